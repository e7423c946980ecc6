#include "tessera/step/weight_average.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/config/option_reader.h"

namespace tessera {

namespace {

constexpr const char* kWeightAverage = "WeightAverage";

at::ScalarType average_dtype(const at::Tensor& live) {
  const auto dtype = live.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

/// A copy with the strides of `tensor`.
at::Tensor copy_as(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

WeightAverage::WeightAverage(std::vector<at::Tensor> live, double decay,
                             WeightAverageOptions options)
    : live_(std::move(live)), decay_(decay), options_(options) {
  check_option(kWeightAverage, "decay", decay, kProbability);
  for (size_t i = 0; i < live_.size(); ++i) {
    if (!live_[i].defined()) {
      throw UsageError(fmt::format("{}: tensor {} of {} is undefined; expected defined tensors",
                                   kWeightAverage, i, live_.size()));
    }
    averages_.push_back(copy_as(live_[i], average_dtype(live_[i])));
  }
}

void WeightAverage::refuse_while_swapped(const char* call) const {
  if (swapped_) {
    throw UsageError(fmt::format(
        "{}: {} was called while the averages are in the live tensors; expected swap() first",
        kWeightAverage, call));
  }
}

void WeightAverage::update() {
  refuse_while_swapped("update()");
  at::NoGradGuard no_grad;
  const auto n = static_cast<double>(updates_);
  const double decay = options_.warmup ? std::min(decay_, (1 + n) / (10 + n)) : decay_;
  for (size_t i = 0; i < live_.size(); ++i) {
    auto& average = averages_[i];
    if (!average.is_floating_point() && !average.is_complex()) {
      average.copy_(live_[i]);
      continue;
    }
    average.lerp_(live_[i].detach().to(average.scalar_type()), 1 - decay);
  }
  ++updates_;
}

void WeightAverage::swap() {
  at::NoGradGuard no_grad;
  if (swapped_) {
    for (size_t i = 0; i < live_.size(); ++i) live_[i].copy_(aside_[i]);
    aside_.clear();
    swapped_ = false;
    return;
  }
  for (const auto& live : live_) aside_.push_back(copy_as(live, live.scalar_type()));
  for (size_t i = 0; i < live_.size(); ++i) live_[i].copy_(averages_[i]);
  swapped_ = true;
}

void WeightAverage::load(const std::vector<at::Tensor>& averages, int64_t updates) {
  refuse_while_swapped("load()");
  check_option(kWeightAverage, "updates", updates, kNotNegative);
  if (averages.size() != averages_.size()) {
    throw UsageError(fmt::format("{}: load() got {} tensors, expected {}", kWeightAverage,
                                 averages.size(), averages_.size()));
  }
  for (size_t i = 0; i < averages.size(); ++i) {
    if (!averages[i].defined() || averages[i].sizes() != averages_[i].sizes()) {
      const auto text = [](const at::Tensor& t) {
        return t.defined() ? fmt::format("[{}]", fmt::join(t.sizes().vec(), ", ")) : "undefined";
      };
      throw UsageError(fmt::format("{}: load(): tensor {} is {}, expected {}", kWeightAverage, i,
                                   text(averages[i]), text(averages_[i])));
    }
  }
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < averages.size(); ++i) averages_[i].copy_(averages[i]);
  updates_ = updates;
}

}  // namespace tessera
