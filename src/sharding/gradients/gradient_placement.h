#pragma once

#include <memory>
#include <vector>

#include <torch/types.h>

namespace tessera::sharding {

/// [Note: gradients in place] Autograd allocates memory for each gradient that it computes; the
/// gradient would then be copied to its window of a bucket. A training step usually computes the
/// same graph as the step before, so the n-th allocation of S bytes in a backward has the same
/// purpose as in the last backward. If it became the gradient of parameter P then, it now receives
/// the memory of P's window: the gradient is computed in place, without a copy and without memory
/// of its own.
///
/// The match is a prediction. A window is handed out only while P has no gradient, and it counts as
/// occupied while a tensor that uses it is alive. A gradient that was computed elsewhere is copied
/// to its window. Before a reducer writes to a window that holds another tensor (a misprediction),
/// it displaces the bucket (see GradientBuckets, SlotPool) and calls exclude(): that window is not
/// used for placement again, and after kMaxMispredictions the feature switches itself off.
///
/// CPU only. Windows of at least 64 KiB that have libtorch's alignment (64 bytes).
class GradientPlacement {
 public:
  GradientPlacement();
  ~GradientPlacement();
  GradientPlacement(const GradientPlacement&) = delete;
  GradientPlacement& operator=(const GradientPlacement&) = delete;

  /// The windows of `parameters` may change, see set_window(). Between backwards.
  void follow(std::vector<at::Tensor> parameters);
  /// From now on the gradient of parameter i belongs in `window`; undefined: nowhere. From any
  /// thread.
  void set_window(size_t i, at::Tensor window);
  /// `windows[i]` is the place of the gradient of `parameters[i]`; an undefined window is not used.
  /// The predictions that were learned stay. Between backwards.
  void set_windows(std::vector<at::Tensor> parameters, const std::vector<at::Tensor>& windows);

  /// A backward has begun on this thread. From here to end() its allocations are counted, and
  /// answered with windows where the last backward predicts one.
  void begin();
  /// The gradient of parameter i is complete; it is in the memory of `gradient`.
  void arrived(size_t i, const at::Tensor& gradient);
  /// The backward is over. `learn`: it reached its end, so it predicts the next one.
  void end(bool learn);

  /// A tensor that was placed in parameter i's window is alive.
  bool occupied(size_t i) const;
  /// The tensors in the windows of `parameters` were mispredictions.
  void exclude(const std::vector<size_t>& parameters);

 private:
  class State;
  std::shared_ptr<State> state_;
};

/// True if a window of this size that begins `offset` bytes after aligned memory can be used.
bool may_be_window(int64_t offset, size_t bytes);

/// True if both have the same elements in the same memory.
bool same_memory(const at::Tensor& a, const at::Tensor& b);

/// True if only autograd references the storage of `.grad` inside the post-accumulate hook, which
/// got `computed`.
bool held_by_autograd(const at::Tensor& grad, const at::Tensor& computed);

}  // namespace tessera::sharding
