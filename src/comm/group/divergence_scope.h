#pragma once

namespace tessera::comm {

/// While the scope lives, the ranks may call different collectives on CPU tensors in this thread.
/// Calls that differ throw Diverged on all ranks. Calls of this kind that are queued behind them
/// throw it too, until ProcessGroup::Impl::rejoin(). Calls outside of a scope are compared as
/// before.
class DivergenceScope {
 public:
  /// `allowed`: false: the scope has no effect.
  explicit DivergenceScope(bool allowed = true);
  ~DivergenceScope();
  DivergenceScope(const DivergenceScope&) = delete;
  DivergenceScope& operator=(const DivergenceScope&) = delete;

 private:
  bool before_;
};

}  // namespace tessera::comm
