#pragma once

#include <memory>
#include <vector>

#include <torch/torch.h>

namespace tessera::sharding {

/// [Note: gradients in place] Autograd asks for memory for each gradient it computes, from which it
/// would be copied to its window of a bucket. Step after step computes the same graph, so the n-th
/// request for S bytes in a backward is for what it was for in the last one. If that became the
/// gradient of P, this time it gets the memory of P's window: the gradient is born where it
/// belongs, without a copy and without memory of its own.
///
/// That is a guess, and need not be right. A window is lent while a tensor made of it lives, and
/// only where P has no gradient yet; a gradient that comes from elsewhere is copied to its window.
/// Who is about to write to a window that is lent to something else keeps off (see
/// Reducer::Core::move_out) and tells so by `exclude`: it is not lent again, and after a few such
/// surprises nothing is.
///
/// CPUs only; windows of 64 KiB and more that are aligned as libtorch aligns (64 bytes).
class GradientPlacement {
 public:
  GradientPlacement();
  ~GradientPlacement();
  GradientPlacement(const GradientPlacement&) = delete;
  GradientPlacement& operator=(const GradientPlacement&) = delete;

  /// `windows[i]` is where the gradient of `parameters[i]` belongs; undefined: it is not lent. What
  /// was learned about the parameters stays. Between backwards.
  void set_windows(std::vector<at::Tensor> parameters, const std::vector<at::Tensor>& windows);

  /// A backward has begun on this thread: from here to end() its requests are counted, and met with
  /// windows where the last one tells which.
  void begin();
  /// Parameter i's gradient, in `gradient`, is complete.
  void arrived(size_t i, const at::Tensor& gradient);
  /// The backward is over. `learn`: it got to its end.
  void end(bool learn);

  /// A tensor lives in parameter i's window.
  bool occupied(size_t i) const;
  /// What lives in the windows of `parameters` was a surprise.
  void exclude(const std::vector<size_t>& parameters);

 private:
  class State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera::sharding
