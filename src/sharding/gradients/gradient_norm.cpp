#include "sharding/gradients/gradient_norm.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "tessera/error.h"
#include "tessera/optim/fused_optimizer.h"

namespace tessera::sharding {

GradientNorm::GradientNorm(const std::string& who, double p) : p_(p) {
  if (!(p > 0))
    throw UsageError(
        fmt::format("{}: norm_type is {}; expected a positive number or infinity", who, p));
}

void GradientNorm::add(const at::Tensor& gradient) {
  if (!gradient.defined()) return;
  any_ = true;
  if (gradient.numel() == 0) return;
  at::NoGradGuard no_grad;
  if (std::isinf(p_)) {
    part_ = std::max(part_, gradient.abs().max().item<double>());
  } else if (p_ == 2 && gradient.scalar_type() == at::kFloat && gradient.is_cpu() &&
             gradient.is_contiguous()) {
    part_ += sum_of_squares(gradient.data_ptr<float>(), gradient.numel());
  } else {
    part_ += gradient.to(at::kDouble).abs().pow(p_).sum().item<double>();
  }
}

double GradientNorm::total(ProcessGroup& group) {
  const auto mine = at::tensor({part_, any_ ? 1.0 : 0.0}, at::kDouble).to(group.control_device());
  const auto all = group.all_gather(mine).cpu().view({-1, 2});
  any_ = all.select(1, 1).max().item<double>() > 0;
  const auto parts = all.select(1, 0);
  return std::isinf(p_) ? parts.max().item<double>() : std::pow(parts.sum().item<double>(), 1 / p_);
}

void check_max_norm(const std::string& who, double max_norm) {
  if (!(max_norm >= 0))
    throw UsageError(fmt::format("{}: max_norm is {}; expected 0 or more", who, max_norm));
}

void check_clip_value(const std::string& who, double clip_value) {
  if (!(clip_value >= 0))
    throw UsageError(fmt::format("{}: clip_value is {}; expected 0 or more", who, clip_value));
}

double clip_factor(double max_norm, double norm) { return std::min(1.0, max_norm / (norm + 1e-6)); }

}  // namespace tessera::sharding
