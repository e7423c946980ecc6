#pragma once

#include <string>

#include <torch/torch.h>

#include "tessera/process_group.h"
#include "tessera/step/clip_grad.h"

namespace tessera::sharding {

/// The p-norm of a gradient whose elements are spread over the ranks, each element on one rank.
/// `p`: any number > 0, or infinity.
class GradientNorm {
 public:
  /// Throws UsageError "<component>: …" for an impossible `p`.
  GradientNorm(const std::string& component, double p);

  /// Adds a part of the gradient that this rank holds. Undefined and empty tensors do not count.
  /// The host does not wait for a device: local() and total() do, once.
  void add(const at::Tensor& gradient);
  /// The norm of this rank's parts. Local.
  double local() const;
  /// The norm of all ranks' parts. Collective.
  double total(ProcessGroup& group);
  /// Whether any rank had a part. Valid after total().
  bool any() const { return any_; }

 private:
  void add_power(const at::Tensor& gradient);
  double part() const;

  double p_, part_ = 0;
  at::Tensor part_on_device_;  // of the tensors on a device
  bool any_ = false;
};

/// Throws UsageError "<component>: …" for a negative bound of the norm.
void check_max_norm(const std::string& component, double max_norm);
/// The same for the bound of single elements.
void check_clip_value(const std::string& component, double clip_value);

}  // namespace tessera::sharding
