#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <vector>

#include <poll.h>
#include <ucontext.h>

#include "sim/schedule.h"
#include "sim/wire.h"

namespace tessera::sim {

/// What would be threads: each runs until it waits, in simulated time. While one of them runs,
/// poll(), connect() to an address, accept4(), nanosleep(), pthread_create(), pthread_join(),
/// steady_clock and random_device of this program are those of tasks.cpp, so that code that blocks
/// runs as it is. It must not wait while it handles an exception.
class Tasks {
 public:
  Tasks(Dice& dice, TimePoint start) : now(start), dice_(dice) {}

  /// A task begins to run in a later turn().
  void start(int number, std::function<void()> body) { add(std::move(body))->number = number; }
  /// Lets one task run, if one has something to do, until it waits again.
  bool turn();
  /// When one has something to do without an event; max(): never.
  TimePoint next() const;
  bool all_ended() const;

  TimePoint now;
  /// connect() of the task of this number: result and errno are those of the function.
  std::function<int(int fd, int number)> connect;
  /// True: accept4() fails because there are too many files.
  std::function<bool()> lacks_files = [] { return false; };

  // For the task that runs.
  struct Task {
    std::function<void()> body;
    int number = -1;
    std::vector<char> stack;
    ucontext_t context;
    pollfd* entries = nullptr;
    nfds_t count = 0;
    int ready = 0;
    TimePoint until, paused_until;
    const Task* joins = nullptr;
    bool ended = false;
    void* fiber = nullptr;  // of a sanitizer
  };
  Task* add(std::function<void()> body);
  int wait(pollfd* entries, nfds_t count, int timeout);
  void sleep(milliseconds time) { wait(nullptr, 0, static_cast<int>(time.count())); }
  void join(const Task* other);
  int connect_it(int fd) { return connect(fd, running_->number); }
  uint32_t random() { return static_cast<uint32_t>(dice_.below(1LL << 32)); }

 private:
  bool can_run(Task& task);
  void run(Task& task);
  void leave(bool for_ever);
  static void begin();

  Dice& dice_;
  std::list<Task> tasks_;
  Task* running_ = nullptr;
  ucontext_t main_;
};

}  // namespace tessera::sim
