#pragma once

#include <string>

#include <torch/types.h>

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
  /// The host does not wait for a device.
  void add(const at::Tensor& gradient);
  /// The norm of this rank's parts, 0-dim float64 on `device`, for which the host does not wait.
  at::Tensor local(at::Device device) const;
  /// The norm of all ranks' parts, likewise. `device` has the same type on all ranks. Collective.
  at::Tensor total(ProcessGroup& group, at::Device device);
  /// True if any rank had a part; with an accelerator whether this rank had. Valid after total().
  bool any() const { return any_; }

 private:
  void add_power(const at::Tensor& gradient);
  at::Tensor part(at::Device device) const;

  double p_, part_ = 0;
  at::Tensor part_on_device_;  // of the tensors on a device
  bool any_ = false;
};

/// Scales gradients of norm `norm`, 0-dim, to a norm of at most `max_norm`. The host
/// does not wait for a device.
class NormClip {
 public:
  NormClip(double max_norm, const at::Tensor& norm);
  void scale(at::Tensor gradient) const;

 private:
  double factor_ = 1;
  at::Tensor factor_on_device_;
};

/// Throws UsageError "<component>: …" for a negative bound of the norm.
void check_max_norm(const std::string& component, double max_norm);
/// The same for the bound of single elements.
void check_clip_value(const std::string& component, double clip_value);

}  // namespace tessera::sharding
