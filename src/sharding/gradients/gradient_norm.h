#pragma once

#include <string>

#include <torch/torch.h>

#include "tessera/process_group.h"

namespace tessera::sharding {

/// The p-norm of a gradient that the ranks hold in parts, each element on one of them: 2, 1,
/// infinity or any p > 0.
class GradientNorm {
 public:
  /// UsageError "<who>: …" for an impossible p.
  GradientNorm(const std::string& who, double p);

  /// A part of this rank's; undefined or empty ones do not count.
  void add(const at::Tensor& gradient);
  /// Over all ranks. Collective.
  double total(ProcessGroup& group);
  /// Whether any rank had a part; after total().
  bool any() const { return any_; }

 private:
  double p_, part_ = 0;
  bool any_ = false;
};

/// UsageError "<who>: …" for a negative bound.
void check_max_norm(const std::string& who, double max_norm);
/// The same for the bound of single elements.
void check_clip_value(const std::string& who, double clip_value);
/// What the gradients are multiplied by so that their norm is at most `max_norm`: 1 or less.
/// torch.nn.utils.clip_grad_norm_'s rule.
double clip_factor(double max_norm, double norm);

}  // namespace tessera::sharding
