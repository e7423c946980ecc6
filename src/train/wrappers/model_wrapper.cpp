#include "tessera/train/model_wrapper.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "tessera/error.h"
#include "tessera/optim/master_weights.h"
#include "tessera/step/nonfinite.h"
#include "tessera/train/optim_wrapper.h"
#include "tessera/train/registries.h"

namespace tessera {
namespace {

void require_prediction(const TrainedModel& model) {
  if (!model.predict)
    throw UsageError(
        "val_step: the model has no prediction; expected a predict(batch) or forward(inputs)");
}

}  // namespace

bool GradientRules::allow(double norm) const {
  if (std::isfinite(norm)) return true;
  if (nonfinite != NonfiniteNorm::error) return nonfinite == NonfiniteNorm::update;
  throw Error(
      fmt::format("update: the norm of the gradient (p = {}) is {}; expected a finite number, "
                  "because error_if_nonfinite is set",
                  norm_type, norm));
}

ModelWrapper::ModelWrapper(TrainedModel model, Preprocessor preprocessor, ProcessGroup group)
    : model_(std::move(model)), group_(std::move(group)), preprocessor_(std::move(preprocessor)) {
  for (auto& named : named_parameters(*model_.module))
    if (!named.second.requires_grad()) frozen_.push_back(std::move(named));
}

/// The optimizer may not have such a parameter, and a resumed run would lack its state.
void ModelWrapper::check_frozen() const {
  for (const auto& [name, parameter] : frozen_) {
    if (!parameter.requires_grad()) continue;
    throw UsageError(fmt::format(
        "rank {}: parameter {} was frozen when training was set up (model.freeze, or the model "
        "itself) and requires a gradient now; expected a parameter that is trainable then: a hook "
        "may freeze it in before_run() and unfreeze it later",
        group_.rank(), name));
  }
}

std::vector<size_t> ModelWrapper::saved_shards() {
  std::vector<size_t> all(shards().size());
  std::iota(all.begin(), all.end(), size_t{0});
  return all;
}

std::vector<ParameterShard> ModelWrapper::loaded_shards() {
  auto result = shards();
  for (const auto& [name, parameter] : frozen_) result.push_back(whole_shard(name, parameter));
  return result;
}

at::Tensor ModelWrapper::forward(const Batch& batch) {
  return call([&] {
    ParsedLosses losses = parse_losses(model_.loss(cast(batch)));
    figures_ = std::move(losses.values);
    return losses.total;
  });
}

Batch ModelWrapper::prepared(const Batch& batch) const {
  check_frozen();
  return preprocessor_ ? preprocessor_(batch, true) : batch;
}

std::vector<std::pair<std::string, at::Tensor>> ModelWrapper::train_step(const Batch& batch,
                                                                         OptimWrapper& optimizer) {
  const Batch input = prepared(batch);
  auto scope = optimizer.optim_context();
  const at::Tensor loss = forward(input);
  scope.end_forward();
  optimizer.update_params(loss);
  return figures_;
}

void ModelWrapper::shadow_train_step(OptimWrapper& optimizer) {
  auto scope = optimizer.optim_context();
  scope.end_forward();
  optimizer.update_params({});
}

/// Hooks of the parameters see this rank's gradients before they are summed with other ranks'.
NonfiniteGradient ModelWrapper::find_nonfinite_gradient(const std::vector<Batch>& parts) {
  const auto parameters = named_parameters(*model_.module);
  std::vector<char> bad(parameters.size(), 0);
  std::vector<std::pair<at::Tensor, unsigned>> hooks;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i].second;
    if (!parameter.requires_grad()) continue;
    const auto look = [&bad, i](const at::Tensor& gradient) {
      if (!nonfinite_text(gradient).empty()) bad[i] = 1;
    };
    hooks.emplace_back(parameter, parameter.register_hook(look));
  }
  for (const auto& part : parts) backward(forward(prepared(part)));
  for (const auto& [parameter, hook] : hooks) parameter.remove_hook(hook);
  drop_gradients();
  end_step({.used = false});
  const auto first = std::find(bad.begin(), bad.end(), 1);
  const auto names = group_.all_gather_bytes(
      first == bad.end() ? "" : parameters[static_cast<size_t>(first - bad.begin())].first,
      "first gradient that is not finite");
  for (size_t rank = 0; rank < names.size(); ++rank)
    if (!names[rank].empty()) return {static_cast<int>(rank), names[rank]};
  return {};
}

std::vector<std::pair<std::string, at::Tensor>> ModelWrapper::replicas() {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& shard : shards())
    result.emplace_back(
        fmt::format("{}[{}:{}]", shard.parameter, shard.begin, shard.begin + shard.numel),
        shard.tensor);
  add_buffers(result);
  return result;
}

void ModelWrapper::add_buffers(std::vector<std::pair<std::string, at::Tensor>>& replicas) const {
  if (!buffers_are_equal_) return;
  for (const auto& buffer : model_.module->named_buffers(true))
    if (buffer.value().defined()) replicas.emplace_back(buffer.key(), buffer.value());
}

at::Tensor ModelWrapper::val_step(const Batch& batch) {
  require_prediction(model_);
  const torch::NoGradGuard no_grad;
  const Batch input = preprocessor_ ? preprocessor_(batch, false) : batch;
  return call([&] { return model_.predict(cast(input)); });
}

ParsedLosses ModelWrapper::val_losses(const Batch& batch, Evaluated* evaluated) {
  if (evaluated != nullptr) require_prediction(model_);
  const torch::NoGradGuard no_grad;
  const Batch input = preprocessor_ ? preprocessor_(batch, false) : batch;
  ParsedLosses losses;
  call([&] {
    const Batch used = cast(input);
    at::Tensor prediction;
    if (evaluated != nullptr) prediction = model_.predict(used);
    const bool once = evaluated != nullptr && model_.loss_of_prediction;
    losses = parse_losses(once ? model_.loss_of_prediction(prediction, used) : model_.loss(used));
    if (evaluated != nullptr) *evaluated = {input, prediction};
    return losses.total;
  });
  return losses;
}

void ModelWrapper::load_extra_state(const std::vector<std::pair<std::string, at::Tensor>>& state) {
  if (!state.empty())
    throw UsageError("checkpoint: further state " + state.front().first +
                     ", of which this parallel.type knows nothing");
}

OptimizerFactory OptimizerPlan::factory() const {
  auto factory = registry::optimizers().factory(type, options);
  return master_weights ? with_master_weights(std::move(factory)) : factory;
}

std::vector<ParameterGroup> OptimizerPlan::groups(const torch::nn::Module& module,
                                                  bool frozen_too) const {
  const auto groups =
      paramwise_groups(module, paramwise, registry::optimizers().complete(type, options));
  std::vector<ParameterGroup> trained;
  for (const auto& group : groups) {
    ParameterGroup kept{{}, group.options};
    for (const auto& [name, parameter] : group.parameters)
      if (frozen_too || parameter.requires_grad()) kept.parameters.emplace_back(name, parameter);
    if (!kept.parameters.empty()) trained.push_back(std::move(kept));
  }
  return trained;
}

}  // namespace tessera
