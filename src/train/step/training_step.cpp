#include "train/step/training_step.h"

#include <cmath>

#include <fmt/format.h>

#include "tessera/error.h"
#include "train/step/device_copies.h"

namespace tessera::train {
namespace {

void check_step_options(const OptimWrapperOptions& options) {
  const auto check = [](bool good, const char* option, auto value, const char* expected) {
    if (!good)
      throw UsageError(fmt::format("OptimWrapper: {}: {}; expected {}", option, value, expected));
  };
  check(options.accumulative_counts >= 1, "accumulative_counts", options.accumulative_counts,
        "a whole number >= 1");
  for (const auto& [name, value] : {std::pair("clip_grad_norm", options.clip_grad_norm),
                                    std::pair("clip_grad_value", options.clip_grad_value)})
    check(!value || *value > 0, name, value.value_or(0), "a number > 0");
  check(options.clip_norm_type > 0, "clip_norm_type", options.clip_norm_type,
        "a number > 0, or infinity");
  const auto type = options.autocast.value_or(at::kHalf);
  check(type == at::kBFloat16 || type == at::kHalf, "autocast", at::toString(type),
        "bfloat16 or float16");
}

}  // namespace

Autocast::Autocast(std::optional<at::ScalarType> dtype) {
  if (!dtype) return;
  compat::AutocastState on = compat::AutocastState::current();
  on.cpu = {*dtype == at::kBFloat16, at::kBFloat16};
  on.cuda = {true, *dtype};
  scope_.emplace(on);
}

Autocast::~Autocast() {
  if (scope_) at::autocast::clear_cache();
}

TrainingStep::TrainingStep(ModelWrapper& model, OptimWrapperOptions options, LrSchedule schedule)
    : model_(model),
      options_(std::move(options)),
      schedule_(std::move(schedule)),
      scaler_(options_.scaler) {
  check_step_options(options_);
  for (const auto& group : model_.optimizer().param_groups())
    base_lrs_.push_back(group.options().get_lr());
}

double StepInput::divisor_of(int64_t part) const {
  if (parts.empty()) return 1;
  int64_t all = 0;
  for (const auto& each : parts) all += each.inputs.size(0);
  return static_cast<double>(all) /
         static_cast<double>(parts[static_cast<size_t>(part)].inputs.size(0));
}

void StepResult::add_figures(const std::vector<std::pair<std::string, at::Tensor>>& values,
                             double share) {
  const auto numbers = read_figures(values);
  auto& figures = record.figures;
  figures.resize(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    figures[i].first = values[i].first;
    figures[i].second += numbers[i] * share;
  }
}

/// The first figure is the total loss.
void StepResult::average(ProcessGroup group, const StepInput& input, bool figures_of_all) {
  const bool data = !record.figures.empty();
  own_loss = data ? record.figures.front().second : 0;
  if (!figures_of_all) record.figures.clear();
  std::vector<double> all{data ? input.weight * own_loss : 0.0};
  const auto flags = input.flags ? input.flags() : std::vector<double>();
  all.insert(all.end(), flags.begin(), flags.end());
  for (const auto& [name, value] : record.figures) all.push_back(input.weight * value);
  const at::Tensor sum = at::tensor(all, at::kDouble).to(group.control_device());
  group.all_reduce(sum, 1, "figures of the step");
  const at::Tensor total = sum.cpu();
  const double* values = total.data_ptr<double>();
  const double count = input.ranks_with_data > 0 ? input.ranks_with_data : group.size();
  record.loss = values[0] / count;
  if (std::isnan(record.loss) || input.left_out) record.loss = std::nan("");  // no sign
  const double* figures = values + 1 + flags.size();
  sums.assign(values + 1, figures);
  for (auto& [name, value] : record.figures) value = *figures++ / count;
}

StepResult TrainingStep::run(const Progress& progress, const StepInput& input,
                             const FaultPolicy& policy, bool figures_of_all) {
  if (std::exchange(unfinished_, true)) {
    model_.drop_gradients();
    model_.end_step({.used = false});
  }
  StepResult result;
  result.record.lr = set_learning_rates(progress);
  const int64_t count = input.left_out ? 0 : options_.accumulative_counts;
  for (int64_t i = 0; i < count; ++i) {
    const auto no_sync = i + 1 < count ? model_.no_sync() : nullptr;
    at::Tensor loss;
    const double divisor = input.divisor_of(i);
    if (!input.parts.empty()) {
      const Batch part = model_.prepared(input.parts[static_cast<size_t>(i)]);
      const Autocast autocast(options_.autocast);
      loss = model_.forward(part);
    }
    backward(loss, divisor / input.weight);
    if (loss.defined()) result.add_figures(model_.figures(), 1 / divisor);
  }
  result.average(model_.group(), input, figures_of_all);
  result.norm = std::nan("");
  if (!input.left_out && policy.may_update(result.record.loss)) {
    const Update done = update();
    result.norm = done.norm;
    result.updated = done.updated;
  } else if (!input.left_out) {
    model_.drop_gradients();
    model_.end_step({.used = false});
  }
  result.updates = {result.updated};
  result.record.grad_norm = result.updated ? std::fabs(result.norm) : std::nan("");
  result.record.loss_scale = scaler_.scale();
  unfinished_ = false;
  return result;
}

double TrainingStep::set_learning_rates(const Progress& progress) {
  auto& groups = model_.optimizer().param_groups();
  for (size_t g = 0; schedule_ && g < groups.size(); ++g)
    groups[g].options().set_lr(schedule_(progress, base_lrs_[g]));
  return groups.front().options().get_lr();
}

void TrainingStep::backward(const at::Tensor& loss, double divisor, double scale) {
  if (!loss.defined()) return model_.shadow_backward();
  at::Tensor part = divisor == 1 ? loss : loss / divisor;
  if (scale != 1) part = (part.element_size() < 4 ? part.to(at::kFloat) : part) * scale;
  model_.backward(part);
}

TrainingStep::Update TrainingStep::update() {
  const double before = scaler_.scale();
  const Update result = update(before);
  model_.end_step({result.updated, scaler_.scale() / before});
  return result;
}

TrainingStep::Update TrainingStep::update(double scale) {
  if (scale != 1) {
    const torch::NoGradGuard no_grad;
    for (const auto& gradient : model_.gradients()) at::Tensor(gradient).mul_(1 / scale);
  }
  // An infinity on any rank makes the norm infinite or NaN, so no other check is needed.
  const bool enabled = options_.scaler.enabled;
  const auto nonfinite = enabled || scale != 1 ? NonfiniteNorm::skip : options_.nonfinite;
  const double norm = model_.update(
      {options_.clip_grad_norm, options_.clip_grad_value, options_.clip_norm_type, nonfinite});
  const bool updated = std::isfinite(norm) || nonfinite == NonfiniteNorm::update;
  if (enabled) scaler_.update(!updated);
  return {norm, updated};
}

}  // namespace tessera::train
