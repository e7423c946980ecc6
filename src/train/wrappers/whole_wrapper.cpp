#include "train/wrappers/whole_wrapper.h"

#include <cmath>

#include "tessera/error.h"
#include "tessera/safetensors_weights.h"
#include "tessera/step/clip_grad.h"
#include "tessera/train/registries.h"

namespace tessera::train {

WholeWrapper::WholeWrapper(WrapperContext context)
    : ModelWrapper(std::move(context.model), std::move(context.preprocessor),
                   std::move(context.group)) {
  std::vector<std::pair<std::vector<at::Tensor>, OptionMap>> groups;
  for (const auto& group : context.optimizer.groups(*model_.module)) {
    auto& [tensors, options] = groups.emplace_back(std::vector<at::Tensor>(), group.options);
    for (const auto& named : group.parameters) {
      tensors.push_back(named.second);
      named_.push_back(named);
    }
  }
  optimizer_ = make_optimizer(context.optimizer, groups);
}

/// Also of parameters that are frozen for some steps: the optimizer keeps their state.
std::vector<ParameterShard> WholeWrapper::shards() {
  std::vector<ParameterShard> result;
  for (const auto& [name, parameter] : named_)
    if (parameter.numel() > 0) result.push_back(whole_shard(name, parameter));
  return result;
}

std::vector<at::Tensor> WholeWrapper::gradients() {
  std::vector<at::Tensor> result;
  for (const auto& [name, parameter] : named_)
    if (parameter.grad().defined()) result.push_back(parameter.grad());
  return result;
}

double WholeWrapper::update(const GradientRules& rules) {
  const auto all = gradients();
  const double norm = clip_gradient_norm_(all, rules.clip_norm.value_or(INFINITY), rules.norm_type);
  if (rules.allow(norm)) {
    if (rules.clip_value) clip_gradient_values_(all, *rules.clip_value);
    step();
  }
  drop_gradients();
  return norm;
}

void WholeWrapper::drop_gradients() {
  for (auto& [name, parameter] : named_) parameter.mutable_grad() = at::Tensor();
}

int64_t WholeWrapper::gradient_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, parameter] : named_) bytes += static_cast<int64_t>(parameter.nbytes());
  return bytes;
}

std::vector<size_t> WholeWrapper::saved_shards() {
  std::vector<SafetensorsSpec> specs;
  for (const auto& shard : shards())
    specs.push_back({shard.parameter, shard.tensor.scalar_type(), shard.shape});
  const auto parts = divide_weights(specs, group_.size());
  const auto rank = static_cast<size_t>(group_.rank());
  return rank < parts.size() ? parts[rank].tensors : std::vector<size_t>();
}

MemoryUse WholeWrapper::memory() {
  return {bytes_of(model_.module->parameters()), gradient_bytes(), bytes_of(state_slices())};
}

WrapperPlan read_unsharded(OptionReader& options) {
  options.finish();
  WrapperPlan plan;
  plan.distributed = false;
  plan.make = [](WrapperContext context) {
    return std::make_unique<WholeWrapper>(std::move(context));
  };
  return plan;
}

}  // namespace tessera::train
