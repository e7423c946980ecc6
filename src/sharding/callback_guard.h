#pragma once

#include <memory>
#include <mutex>
#include <utility>

namespace tessera::sharding {

/// Cancels callbacks that run on a process group's thread. A backward that throws leaves
/// collectives running. These may outlive the objects that their callbacks use. After the guard is
/// destroyed, a guarded callback does nothing; the destructor waits for a callback that is running.
/// Declare the guard as the last member, so that it is destroyed first.
class CallbackGuard {
 public:
  CallbackGuard() = default;
  ~CallbackGuard() {
    std::lock_guard lock(state_->mutex);
    state_->over = true;
  }
  CallbackGuard(const CallbackGuard&) = delete;
  CallbackGuard& operator=(const CallbackGuard&) = delete;

  template <class Callback>
  auto guard(Callback callback) const {
    return [state = state_, callback = std::move(callback)](const auto&... arguments) {
      std::lock_guard lock(state->mutex);
      if (!state->over) callback(arguments...);
    };
  }

 private:
  struct State {
    std::mutex mutex;
    bool over = false;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace tessera::sharding
