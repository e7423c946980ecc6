#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "tessera/detail/own_process.h"
#include "tessera/process_group.h"

namespace tessera {

namespace comm {

/// Sums the time that callers spent waiting.
class WaitClock {
 public:
  void add(std::chrono::nanoseconds time) { nanoseconds_ += time.count(); }
  std::chrono::nanoseconds total() const { return std::chrono::nanoseconds(nanoseconds_.load()); }
  void reset() { nanoseconds_ = 0; }

 private:
  std::atomic<int64_t> nanoseconds_{0};
};

/// Adds its own lifetime to a clock; null: to none.
class WaitTimer {
 public:
  explicit WaitTimer(WaitClock* clock) : clock_(clock), start_(std::chrono::steady_clock::now()) {}
  ~WaitTimer() {
    if (clock_ != nullptr) clock_->add(std::chrono::steady_clock::now() - start_);
  }
  WaitTimer(const WaitTimer&) = delete;

 private:
  WaitClock* clock_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace comm

class Work::State {
 public:
  explicit State(std::shared_ptr<comm::WaitClock> clock = nullptr) : clock_(std::move(clock)) {}
  virtual ~State() = default;
  virtual void wait();
  virtual bool done();
  /// Waits for at most `most`. Returns done(), and throws nothing.
  bool done_within(std::chrono::milliseconds most);
  /// True if the operation is done and has an error. No caller gets the error by this call.
  bool failed();
  void finish(std::exception_ptr error);
  /// The error, if neither wait() nor this function has given it to a caller yet.
  std::exception_ptr take_unseen_error();

 private:
  std::mutex mutex_;
  bool seen_ = false;  // a caller has got the error
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
  std::shared_ptr<comm::WaitClock> clock_;
  detail::OwnProcess process_;
};

namespace comm {

/// Runs the operations of one group one at a time, in the order of submission. The calling thread
/// runs an operation itself if it gets a turn; other operations run on a worker thread, which is
/// started when first needed.
class Queue {
 public:
  /// `clock` gets the time that callers spend in turns and in waiting for submitted work.
  explicit Queue(std::shared_ptr<WaitClock> clock) : clock_(std::move(clock)) {}
  ~Queue();

  /// While the turn is held, no other operation of the queue runs.
  class Turn {
   public:
    Turn() = default;
    explicit Turn(Queue* queue) : queue_(queue), timer_(std::in_place, queue->clock_.get()) {}
    ~Turn() {
      if (queue_ != nullptr) queue_->end_turn();
    }
    Turn(const Turn&) = delete;
    explicit operator bool() const { return queue_ != nullptr; }

   private:
    Queue* queue_ = nullptr;
    std::optional<WaitTimer> timer_;
  };
  /// Empty if an operation is running or queued, or after stop(). Does not block.
  Turn try_turn();

  using Operation = std::function<void()>;
  Work submit(Operation operation);
  /// As submit(), for an operation whose state is looked at without taking its error.
  std::shared_ptr<Work::State> add(Operation operation);
  /// Throws the error of a submitted operation if nobody has waited for its Work yet. Each
  /// collective begins with this call. Otherwise this rank would continue, out of step with the
  /// ranks that know of the error.
  void throw_unseen_error();
  /// Drops the operations that have not begun (their Work throws) and waits for the running one.
  /// The caller must end the running one soon.
  void stop() noexcept;

 private:
  struct Item {
    Operation operation;
    std::shared_ptr<Work::State> state;
  };
  void loop();
  void end_turn();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool busy_ = false;
  bool stopped_ = false;
  std::shared_ptr<Work::State> failed_;  // the last operation that failed
  std::thread worker_;
  std::shared_ptr<WaitClock> clock_;
};

}  // namespace comm
}  // namespace tessera
