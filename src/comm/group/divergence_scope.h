#pragma once

namespace tessera::comm {

/// While it lives, the ranks may call different collectives on tensors of the CPU in this thread.
/// If such calls meet, each of them throws Diverged on all ranks, and so do the calls of this kind
/// that are queued behind them, until ProcessGroup::Impl::rejoin(). Calls outside of a scope are
/// compared as before.
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
