#include "sharding/gradients/gradient_norm.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "tessera/error.h"
#include "tessera/optim/fused_optimizer.h"

namespace tessera::sharding {
namespace {

/// The norm from the sum of p-th powers (for infinity: from the maximum).
double norm_of(double part, double p) {
  if (std::isinf(p)) return part;
  return p == 2 ? std::sqrt(part) : std::pow(part, 1 / p);
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
    part_ += sum_of_squares(gradient.data_ptr<float>(), gradient.numel());
  } else {
    part_ += gradient.to(at::kDouble).abs().pow(p_).sum().item<double>();
  }
}

void GradientNorm::add_power(const at::Tensor& gradient) {
  auto power = at::linalg_vector_norm(gradient, p_, at::OptionalIntArrayRef(), false, at::kDouble);
  if (!std::isinf(p_)) power = power.pow(p_);
  if (part_on_device_.defined()) {
    power = power.to(part_on_device_.device());
    power = std::isinf(p_) ? at::maximum(part_on_device_, power)  // keeps a NaN
                           : part_on_device_ + power;
  }
  part_on_device_ = power;
}

double GradientNorm::part() const {
  if (!part_on_device_.defined()) return part_;
  const auto of_device = part_on_device_.item<double>();
  if (!std::isinf(p_)) return part_ + of_device;
  return of_device > part_ || std::isnan(of_device) ? of_device : part_;
}

double GradientNorm::total(ProcessGroup& group) {
  const auto mine = at::tensor({part(), any_ ? 1.0 : 0.0}, at::kDouble);
  const auto all = group.all_gather(mine).view({-1, 2});
  any_ = all.select(1, 1).max().item<double>() > 0;
  const auto parts = all.select(1, 0);
  return norm_of((std::isinf(p_) ? parts.max() : parts.sum()).item<double>(), p_);
}

double GradientNorm::local() const { return norm_of(part(), p_); }

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

double gradient_norm(const std::vector<at::Tensor>& gradients, double p) {
  sharding::GradientNorm norm("gradient_norm", p);
  for (const auto& gradient : gradients) norm.add(gradient);
  return norm.local();
}

double clip_factor(double max_norm, double norm) {
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : factor;  // NaN stays NaN, as in torch
}

double clip_gradient_norm_(const std::vector<at::Tensor>& gradients, double max_norm, double p) {
  sharding::check_max_norm("clip_gradient_norm_", max_norm);
  const double norm = gradient_norm(gradients, p);
  const double factor = clip_factor(max_norm, norm);
  if (factor == 1) return norm;
  const at::NoGradGuard no_grad;
  for (const auto& gradient : gradients) {
    if (gradient.defined()) at::Tensor(gradient).mul_(factor);
  }
  return norm;
}

void clip_gradient_values_(const std::vector<at::Tensor>& gradients, double clip_value) {
  sharding::check_clip_value("clip_gradient_values_", clip_value);
  const at::NoGradGuard no_grad;
  for (const auto& gradient : gradients) {
    if (gradient.defined()) at::Tensor(gradient).clamp_(-clip_value, clip_value);
  }
}

}  // namespace tessera
