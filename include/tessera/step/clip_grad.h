#pragma once

#include <vector>

#include <torch/types.h>

// Norm and clipping of gradients that one rank holds as a whole. ZeroRedundancyOptimizer and
// FullyShardedDataParallel have members of their own, which use the same norm and the same factor
// over all ranks' shards. All functions are local.

namespace tessera {

/// The p-norm of all elements of `gradients` together, accumulated in float64. `p`: any number > 0,
/// or infinity for the largest absolute value; UsageError otherwise. Undefined and empty tensors do
/// not count.
double gradient_norm(const std::vector<at::Tensor>& gradients, double p = 2);

/// min(1, max_norm / (norm + 1e-6)): the factor that scales gradients of norm `norm` to a norm of
/// at most `max_norm`. NaN for a norm that is NaN, so that the gradients become NaN too. The rule
/// of torch.nn.utils.clip_grad_norm_.
double clip_factor(double max_norm, double norm);

/// Multiplies `gradients` in place by clip_factor() and returns their norm before that. UsageError
/// for a negative `max_norm` or an impossible `p`.
double clip_gradient_norm_(const std::vector<at::Tensor>& gradients, double max_norm, double p = 2);
/// The same; the norm is a 0-dim float64 tensor on the device of the first gradient. The host does
/// not wait for the device until the program reads it.
at::Tensor clip_gradient_norm_tensor_(const std::vector<at::Tensor>& gradients, double max_norm,
                                      double p = 2);

/// Clamps every element in place to [-clip_value, clip_value]. UsageError for a negative bound.
void clip_gradient_values_(const std::vector<at::Tensor>& gradients, double clip_value);

}  // namespace tessera
