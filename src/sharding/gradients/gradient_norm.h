#pragma once

#include <string>

#include <torch/torch.h>

#include "tessera/process_group.h"

namespace tessera::sharding {

/// The p-norm of a gradient whose elements are distributed over the ranks, each element on one
/// rank. p is 1, 2, infinity or any number > 0.
class GradientNorm {
 public:
  /// UsageError "<who>: …" for an impossible p.
  GradientNorm(const std::string& who, double p);

  /// Adds a tensor of this rank's part. Undefined and empty tensors do not count.
  void add(const at::Tensor& gradient);
  /// The norm over all ranks. Collective.
  double total(ProcessGroup& group);
  /// True if any rank had added a tensor; after total().
  bool any() const { return any_; }

 private:
  double p_, part_ = 0;
  bool any_ = false;
};

/// UsageError "<who>: …" for a negative bound.
void check_max_norm(const std::string& who, double max_norm);
/// UsageError "<who>: …" for a bound of single elements that is negative or NaN.
void check_clip_value(const std::string& who, double clip_value);
/// The factor, at most 1, that scales gradients of norm `norm` so that their norm is at most
/// `max_norm`. The rule of torch.nn.utils.clip_grad_norm_.
double clip_factor(double max_norm, double norm);

}  // namespace tessera::sharding
