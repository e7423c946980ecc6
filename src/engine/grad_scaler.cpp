#include "tessera/step/grad_scaler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tessera/config/option_reader.h"

namespace tessera {

namespace {

constexpr const char* kGradScaler = "GradScaler";

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

/// The real numbers of the gradients that have elements.
std::vector<at::Tensor> numbers_of(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> numbers;
  for (const auto& gradient : gradients) {
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const auto values = gradient.is_sparse() ? gradient._values() : gradient;
    numbers.push_back(values.is_complex() ? at::view_as_real(values.resolve_conj()) : values);
  }
  return numbers;
}

/// If the sum of all gradients is finite, every element is. That takes one pass without a temporary
/// and one wait for the device. A sum that is not finite may be an overflow of finite elements, so
/// then every tensor is checked, with another wait.
bool all_finite(const std::vector<at::Tensor>& gradients) {
  const auto numbers = numbers_of(gradients);
  at::Tensor total = at::zeros({});
  for (const auto& tensor : numbers)
    total = total + (is_half(tensor) ? tensor.sum(at::kFloat) : tensor.sum());
  if (std::isfinite(total.item<double>())) return true;
  at::Tensor with_infinities = at::zeros({});
  for (const auto& tensor : numbers)
    with_infinities = with_infinities + (1 - at::isfinite(tensor).all().to(at::kFloat));
  return with_infinities.item<double>() == 0;
}

}  // namespace

void GradScalerOptions::read(OptionReader& options) {
  options.read("init_scale", init_scale, "scale of the first step", kPositive);
  options.read("growth_factor", growth_factor, "factor of the scale when it grows",
               Range{.min = 1, .min_open = true});
  options.read("backoff_factor", backoff_factor, "factor of the scale after an overflow",
               Range{0, 1, true, true});
  options.read("growth_interval", growth_interval,
               "steps without an overflow after which the scale grows", kAtLeastOne);
}

GradScaler::GradScaler(GradScalerOptions options) : options_(options) {
  check_options(kGradScaler, options);
  state_.scale = options.init_scale;
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  if (!options_.enabled) return loss;
  return (is_half(loss) ? loss.to(at::kFloat) : loss) * state_.scale;
}

bool GradScaler::found_inf(const std::vector<at::Tensor>& gradients, ProcessGroup& group) const {
  if (!options_.enabled) return false;
  at::NoGradGuard no_grad;
  const auto ranks_with = at::full({1}, all_finite(gradients) ? 0.0 : 1.0,
                                   at::TensorOptions(at::kFloat).device(group.control_device()));
  group.all_reduce(ranks_with, 1, "ranks with infinite gradients");
  return ranks_with.item<double>() > 0;
}

void GradScaler::update(bool found_inf) {
  if (!options_.enabled || !options_.dynamic) return;
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
  check_option(kGradScaler, "state.scale", state.scale, kPositive);
  check_option(kGradScaler, "state.growth_tracker", state.growth_tracker, kNotNegative);
  state_ = state;
}

}  // namespace tessera
