#include "comm/execution/queue.h"

#include <utility>

#include "tessera/error.h"

namespace tessera {

void Work::State::wait() {
  std::unique_lock lock(mutex_);
  const comm::WaitTimer timer(done_ ? nullptr : clock_.get());
  if (!done_ && !process_.is_this())
    throw UsageError("ProcessGroup: a forked child waits for a collective of its parent");
  changed_.wait(lock, [&] { return done_; });
  if (!error_) return;
  seen_ = true;
  std::rethrow_exception(error_);
}

bool Work::State::done_within(std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, most, [&] { return done_; });
}

bool Work::State::failed() {
  std::lock_guard lock(mutex_);
  return done_ && error_;
}

std::exception_ptr Work::State::take_unseen_error() {
  std::lock_guard lock(mutex_);
  return std::exchange(seen_, true) ? nullptr : error_;
}

bool Work::State::done() {
  std::lock_guard lock(mutex_);
  return done_;
}

void Work::State::finish(std::exception_ptr error) {
  {
    std::lock_guard lock(mutex_);
    done_ = true;
    error_ = std::move(error);
  }
  changed_.notify_all();
}

void Work::wait() {
  if (state_) state_->wait();
}

bool Work::done() const { return !state_ || state_->done(); }

namespace comm {

Queue::~Queue() { stop(); }

Queue::Turn Queue::try_turn() {
  std::lock_guard lock(mutex_);
  if (busy_ || !items_.empty() || stopped_) return Turn();
  busy_ = true;
  return Turn(this);
}

void Queue::end_turn() {
  {
    std::lock_guard lock(mutex_);
    busy_ = false;
  }
  changed_.notify_all();
}

Work Queue::submit(Operation operation) { return Work(add(std::move(operation))); }

std::shared_ptr<Work::State> Queue::add(Operation operation) {
  auto state = std::make_shared<Work::State>(clock_);
  {
    std::lock_guard lock(mutex_);
    if (stopped_)
      throw BrokenWorldError(
          "ProcessGroup: a collective was started after the group had been shut down", {});
    if (!worker_.joinable()) worker_ = std::thread([this] { loop(); });
    items_.push_back({std::move(operation), state});
  }
  changed_.notify_all();
  return state;
}

void Queue::throw_unseen_error() {
  std::unique_lock lock(mutex_);
  const auto failed = std::exchange(failed_, nullptr);
  lock.unlock();
  if (const auto error = failed ? failed->take_unseen_error() : nullptr)
    std::rethrow_exception(error);
}

void Queue::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopped_ || (!busy_ && !items_.empty()); });
    if (stopped_) break;
    Item item = std::move(items_.front());
    items_.pop_front();
    busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      item.operation();
    } catch (...) {
      error = std::current_exception();
    }
    item.operation = nullptr;  // releases its tensors before waiting threads continue
    lock.lock();
    busy_ = false;
    if (error) failed_ = item.state;
    item.state->finish(error);
    lock.unlock();
    changed_.notify_all();
    lock.lock();
  }
}

void Queue::stop() noexcept {
  std::deque<Item> dropped;
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    dropped.swap(items_);
  }
  changed_.notify_all();
  const auto error = std::make_exception_ptr(
      BrokenWorldError("ProcessGroup: the group was shut down before this collective began", {}));
  for (auto& item : dropped) item.state->finish(error);
  if (worker_.joinable()) worker_.join();
}

}  // namespace comm
}  // namespace tessera
