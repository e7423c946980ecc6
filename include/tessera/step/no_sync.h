#pragma once

#include <functional>
#include <utility>

namespace tessera {

/// Returned by the wrappers' no_sync(). While it is alive, backward passes accumulate gradients
/// locally and send nothing; its destructor restores the previous setting. Local, but all ranks
/// must use it in the same way. The wrapper must outlive it.
class NoSync {
 public:
  using Switch = std::function<void(bool sync)>;

  /// Calls set(false) now and set(before) in the destructor. `before` is the wrapper's current
  /// setting.
  NoSync(bool before, Switch set) : set_(std::move(set)), before_(before) { set_(false); }
  ~NoSync() {
    if (set_) set_(before_);
  }
  /// The object that was moved from has no effect any more.
  NoSync(NoSync&& other) noexcept
      : set_(std::exchange(other.set_, nullptr)), before_(other.before_) {}
  NoSync& operator=(NoSync&& other) noexcept {
    NoSync old(std::move(*this));
    set_ = std::exchange(other.set_, nullptr);
    before_ = other.before_;
    return *this;
  }

 private:
  Switch set_;
  bool before_;
};

}  // namespace tessera
