#include "sharding/gradients/gradient_norm.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "tessera/error.h"
#include "tessera/optim/fused_optimizer.h"

namespace tessera::sharding {
namespace {

constexpr double kNormEps = 1e-6;  // of torch.nn.utils.clip_grad_norm_

/// The sum of p-th powers (for infinity: the maximum) over the ranks' parts.
at::Tensor sum_of(const at::Tensor& parts, double p) {
  return std::isinf(p) ? parts.max() : parts.sum();
}

at::Tensor scalar(double value, at::Device device) {
  return at::full({}, value, at::TensorOptions().dtype(at::kDouble).device(device));
}

/// The norm from that.
at::Tensor norm_of(const at::Tensor& part, double p) {
  if (std::isinf(p)) return part;
  if (p == 2) return part.sqrt();
  return part.is_cpu() ? scalar(std::pow(part.item<double>(), 1 / p), at::kCPU) : part.pow(1 / p);
}

at::Device device_of(const std::vector<at::Tensor>& gradients) {
  for (const auto& gradient : gradients)
    if (gradient.defined()) return gradient.device();
  return at::kCPU;
}

}  // namespace

GradientNorm::GradientNorm(const std::string& component, double p) : p_(p) {
  if (!(p > 0))
    throw UsageError(
        fmt::format("{}: norm_type is {}; expected a positive number or infinity", component, p));
}

void GradientNorm::add(const at::Tensor& gradient) {
  if (!gradient.defined()) return;
  any_ = true;
  if (gradient.numel() == 0) return;
  at::NoGradGuard no_grad;
  if (!gradient.is_cpu()) {
    add_power(gradient);
  } else if (std::isinf(p_)) {
    const double largest = gradient.abs().max().item<double>();
    if (largest > part_ || std::isnan(largest)) part_ = largest;  // std::max would lose a NaN
  } else if (p_ == 2 && gradient.scalar_type() == at::kFloat && gradient.is_contiguous()) {
    const auto values = gradient.detach();  // waits for a gradient that has not arrived
    part_ += sum_of_squares(values.data_ptr<float>(), values.numel());
  } else {
    part_ += gradient.abs().to(at::kDouble).pow(p_).sum().item<double>();
  }
}

void GradientNorm::add_power(const at::Tensor& gradient) {
  const auto real = gradient.is_complex() ? gradient.abs() : gradient;
  auto power = at::linalg_vector_norm(real, p_, at::OptionalIntArrayRef(), false, at::kDouble);
  if (!std::isinf(p_)) power = power.pow(p_);
  if (part_on_device_.defined()) {
    power = power.to(part_on_device_.device());
    power = std::isinf(p_) ? at::maximum(part_on_device_, power)  // keeps a NaN
                           : part_on_device_ + power;
  }
  part_on_device_ = power;
}

at::Tensor GradientNorm::part(at::Device device) const {
  if (!part_on_device_.defined()) return scalar(part_, device);
  const auto of_device = part_on_device_.to(device);
  if (part_ == 0) return of_device;
  return std::isinf(p_) ? at::maximum(of_device, scalar(part_, device)) : of_device + part_;
}

at::Tensor GradientNorm::local(at::Device device) const { return norm_of(part(device), p_); }

at::Tensor GradientNorm::total(ProcessGroup& group, at::Device device) {
  const auto mine = part(device).view({1});
  if (!device.is_cpu()) return norm_of(sum_of(group.all_gather(mine), p_), p_);
  const auto flag = at::full({1}, any_ ? 1.0 : 0.0, at::kDouble);
  const auto all = group.all_gather(at::cat({mine, flag})).view({-1, 2});
  any_ = all.select(1, 1).max().item<double>() > 0;
  return norm_of(sum_of(all.select(1, 0), p_), p_);
}

// min(1, max_norm / norm). A NaN stays a NaN, as in torch.
NormClip::NormClip(double max_norm, const at::Tensor& norm) {
  if (std::isinf(max_norm)) return;
  if (norm.is_cpu()) factor_ = std::min(max_norm / (norm.item<double>() + kNormEps), 1.0);
  else factor_on_device_ = (max_norm / (norm + kNormEps)).clamp_max(1);  // keeps a NaN
}

void NormClip::scale(at::Tensor gradient) const {
  if (factor_on_device_.defined()) gradient.mul_(factor_on_device_.to(gradient.device()));
  else if (factor_ != 1) gradient.mul_(factor_);
}

void check_max_norm(const std::string& component, double max_norm) {
  if (!(max_norm >= 0))
    throw UsageError(fmt::format("{}: max_norm is {}; expected 0 or more", component, max_norm));
}

void check_clip_value(const std::string& component, double clip_value) {
  if (!(clip_value >= 0))
    throw UsageError(
        fmt::format("{}: clip_value is {}; expected 0 or more", component, clip_value));
}

}  // namespace tessera::sharding

namespace tessera {

GradNorm clip_gradient_norm_(const std::vector<at::Tensor>& gradients, double max_norm, double p) {
  sharding::check_max_norm("clip_gradient_norm_", max_norm);
  const at::NoGradGuard no_grad;
  sharding::GradientNorm norm("clip_gradient_norm_", p);
  for (const auto& gradient : gradients) norm.add(gradient);
  auto before = norm.local(sharding::device_of(gradients));
  const sharding::NormClip clip(max_norm, before);
  for (const auto& gradient : gradients)
    if (gradient.defined()) clip.scale(gradient);
  return GradNorm(std::move(before));
}

void clip_gradient_values_(const std::vector<at::Tensor>& gradients, double clip_value) {
  sharding::check_clip_value("clip_gradient_values_", clip_value);
  const at::NoGradGuard no_grad;
  for (const auto& gradient : gradients)
    if (gradient.defined()) at::Tensor(gradient).clamp_(-clip_value, clip_value);
}

}  // namespace tessera
