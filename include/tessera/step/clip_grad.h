#pragma once

#include <utility>
#include <vector>

#include <torch/types.h>

#pragma GCC visibility push(default)
namespace tessera {

/// The norm of gradients before clipping: a 0-dim float64 tensor on their device.
class GradNorm {
 public:
  explicit GradNorm(at::Tensor norm) : norm_(std::move(norm)) {}
  /// Waits for the device.
  operator double() const { return norm_.item<double>(); }
  /// The host does not wait for the device until the program reads it.
  const at::Tensor& tensor() const { return norm_; }

 private:
  at::Tensor norm_;
};

/// Scales gradients that this rank has as a whole, in place, so that the p-norm of all of them
/// together is at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does. Infinity scales nothing.
/// The norm is accumulated in float64; a NaN in it makes all gradients NaN. `p`: any number > 0, or
/// infinity for the largest absolute value. Undefined and empty tensors do not count. UsageError
/// for a negative `max_norm` or an impossible `p`. Local: ZeroRedundancyOptimizer and
/// FullyShardedDataParallel have members of this kind, for gradients that are spread over the
/// ranks.
GradNorm clip_gradient_norm_(const std::vector<at::Tensor>& gradients, double max_norm,
                             double p = 2);

/// Clamps every element in place to [-clip_value, clip_value]. UsageError for a negative bound.
/// Local.
void clip_gradient_values_(const std::vector<at::Tensor>& gradients, double clip_value);

}  // namespace tessera
#pragma GCC visibility pop
