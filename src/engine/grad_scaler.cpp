#include "tessera/step/grad_scaler.h"

#include <algorithm>
#include <limits>

#include "engine/option_check.h"

namespace tessera {

namespace {

constexpr const char* kGradScaler = "GradScaler";

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

bool has_elements(const at::Tensor& gradient) { return gradient.defined() && gradient.numel() > 0; }

/// If the sum of all gradients is finite, every element is. That takes one pass without a temporary
/// and one wait for the device. A sum that is not finite may be an overflow of finite elements, so
/// then every tensor is checked.
bool all_finite(const std::vector<at::Tensor>& gradients) {
  at::Tensor total = at::zeros({});
  for (const auto& gradient : gradients) {
    if (has_elements(gradient)) {
      total = total + (is_half(gradient) ? gradient.sum(at::kFloat) : gradient.sum());
    }
  }
  return at::isfinite(total).item<bool>() ||
         std::all_of(gradients.begin(), gradients.end(), [](const at::Tensor& gradient) {
           return !has_elements(gradient) || at::isfinite(gradient).all().item<bool>();
         });
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(options) {
  engine::check_positive(kGradScaler, "init_scale", options.init_scale);
  engine::check_option(kGradScaler, "growth_factor", options.growth_factor,
                       std::isfinite(options.growth_factor) && options.growth_factor > 1,
                       "a number > 1");
  engine::check_option(kGradScaler, "backoff_factor", options.backoff_factor,
                       options.backoff_factor > 0 && options.backoff_factor < 1,
                       "a number in (0, 1)");
  engine::check_at_least(kGradScaler, "growth_interval", options.growth_interval, 1);
  state_.scale = options.init_scale;
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  if (!options_.enabled) {
    return loss;
  }
  return (is_half(loss) ? loss.to(at::kFloat) : loss) * state_.scale;
}

bool GradScaler::found_inf(const std::vector<at::Tensor>& gradients, ProcessGroup& group) const {
  if (!options_.enabled) {
    return false;
  }
  at::NoGradGuard no_grad;
  const auto ranks_with = at::full({1}, all_finite(gradients) ? 0.0 : 1.0,
                                   at::TensorOptions(at::kFloat).device(group.control_device()));
  group.all_reduce(ranks_with);
  return ranks_with.item<double>() > 0;
}

void GradScaler::update(bool found_inf) {
  if (!options_.enabled || !options_.dynamic) {
    return;
  }
  using Float = std::numeric_limits<float>;
  if (found_inf) {
    state_.scale = std::max<double>(state_.scale * options_.backoff_factor, Float::min());
    state_.growth_tracker = 0;
  } else if (++state_.growth_tracker >= options_.growth_interval) {
    const double grown = state_.scale * options_.growth_factor;
    state_.scale = grown <= Float::max() ? grown : state_.scale;
    state_.growth_tracker = 0;
  }
}

void GradScaler::load_state(const State& state) {
  engine::check_positive(kGradScaler, "state.scale", state.scale);
  engine::check_at_least(kGradScaler, "state.growth_tracker", state.growth_tracker, 0);
  state_ = state;
}

}  // namespace tessera
