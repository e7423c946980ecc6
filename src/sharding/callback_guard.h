#pragma once

#include <memory>
#include <mutex>
#include <utility>

namespace tessera::sharding {

/// For callbacks that run on a process group's thread: a backward that throws leaves collectives
/// under way, which may outlive what their callbacks work on. Guarded ones do nothing once the
/// lifeline is gone; its destruction waits for the one that runs. A member that is declared last.
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
