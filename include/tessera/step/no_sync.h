#pragma once

#include <functional>
#include <utility>

namespace tessera {

/// What no_sync() of the wrappers returns: while alive, backward passes accumulate locally and
/// nothing is sent; then it is as before. Local, on all ranks alike. The wrapper must outlive it.
class NoSync {
 public:
  using Switch = std::function<void(bool sync)>;

  /// `before`: whether the wrapper synchronises now. Switches it off.
  NoSync(bool before, Switch set) : set_(std::move(set)), before_(before) { set_(false); }
  ~NoSync() { set_(before_); }
  NoSync(const NoSync&) = delete;

 private:
  Switch set_;
  bool before_;
};

}  // namespace tessera
