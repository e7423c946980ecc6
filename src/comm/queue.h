#pragma once

#include "tessera/process_group.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace tessera {

class Work::State {
 public:
  virtual ~State() = default;
  virtual void wait();
  virtual bool done();
  void finish(std::exception_ptr error);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

namespace comm {

/// Runs the operations of one group one at a time, in the order of submission: at once in the calling thread when nothing is
/// under way, else in a worker thread that is started when first needed.
class Queue {
 public:
  ~Queue();

  using Operation = std::function<void()>;
  void run(Operation operation);
  Work submit(Operation operation);
  /// Drops what has not begun (its Work throws) and waits for what has. The caller makes that end soon.
  void stop() noexcept;

 private:
  struct Item {
    Operation operation;
    std::shared_ptr<Work::State> state;
  };
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool busy_ = false;
  bool stopped_ = false;
  std::thread worker_;
};

}  // namespace comm
}  // namespace tessera
