#include "train/wrappers/models_wrapper.h"

#include "tessera/error.h"

namespace tessera::train {
namespace {

using Tensors = std::vector<std::pair<std::string, at::Tensor>>;

void rename(const std::string& prefix, ParameterShard& shard) {
  shard.parameter = prefix + "." + shard.parameter;
}
void rename(const std::string& prefix, StateSlice& slice) {
  slice.parameter = prefix + "." + slice.parameter;
}
void rename(const std::string& prefix, std::pair<std::string, at::Tensor>& named) {
  named.first = prefix + "." + named.first;
}

/// The entries that `of` returns for each model, in one list, with the model's name before each.
template <class Function>
auto joined(const std::vector<NamedWrapper>& models, const Function& of) {
  decltype(of(models.front().wrapper)) all;
  for (const auto& [name, wrapper] : models) {
    for (auto& each : of(wrapper)) {
      rename(name, each);
      all.push_back(std::move(each));
    }
  }
  return all;
}

/// "generator" and "net.weight" of "generator.net.weight". No name of a model has a dot.
std::pair<std::string, std::string> split(const std::string& name) {
  const auto dot = name.find('.');
  return {name.substr(0, dot), name.substr(dot + 1)};
}

}  // namespace

ModelsWrapper::ModelsWrapper(std::vector<NamedWrapper> models, TrainedModel model,
                             Preprocessor preprocessor, ProcessGroup group)
    : ModelWrapper(std::move(model), std::move(preprocessor), std::move(group)),
      models_(std::move(models)) {}

void ModelsWrapper::refuse(const char* member) const {
  throw UsageError(std::string("ModelWrapper.") + member +
                   "(): this is the wrapper of all models of the run; expected that of one of "
                   "them: StepModel::wrapper(), or RunState::models");
}

std::vector<at::Tensor> ModelsWrapper::gradients() { refuse("gradients"); }
double ModelsWrapper::update(const GradientRules&) { refuse("update"); }
torch::optim::Optimizer& ModelsWrapper::optimizer() { refuse("optimizer"); }
OptimizerStateDict ModelsWrapper::optimizer_state_dict() { refuse("optimizer_state_dict"); }
void ModelsWrapper::load_optimizer_state_dict(const OptimizerStateDict&) {
  refuse("load_optimizer_state_dict");
}

void ModelsWrapper::drop_gradients() {
  for (const auto& [name, wrapper] : models_) wrapper.drop_gradients();
}
void ModelsWrapper::wait() {
  for (const auto& [name, wrapper] : models_) wrapper.wait();
}
void ModelsWrapper::before_shard_writes() {
  for (const auto& [name, wrapper] : models_) wrapper.before_shard_writes();
}
void ModelsWrapper::publish_shards() {
  for (const auto& [name, wrapper] : models_) wrapper.publish_shards();
}

std::vector<ParameterShard> ModelsWrapper::shards() {
  return joined(models_, [](ModelWrapper& wrapper) { return wrapper.shards(); });
}
std::vector<ParameterShard> ModelsWrapper::loaded_shards() {
  return joined(models_, [](ModelWrapper& wrapper) { return wrapper.loaded_shards(); });
}
Tensors ModelsWrapper::replicas() {
  return joined(models_, [](ModelWrapper& wrapper) { return wrapper.replicas(); });
}
Tensors ModelsWrapper::extra_state() {
  return joined(models_, [](ModelWrapper& wrapper) { return wrapper.extra_state(); });
}
std::vector<StateSlice> ModelsWrapper::state_slices() {
  return joined(models_, [](ModelWrapper& wrapper) { return wrapper.state_slices(); });
}

void ModelsWrapper::load_state_slices(std::vector<StateSlice>&& slices) {
  for (const auto& [name, wrapper] : models_) {
    std::vector<StateSlice> own;
    for (auto& slice : slices) {
      const auto [model, parameter] = split(slice.parameter);
      if (model != name) continue;
      own.push_back(std::move(slice));
      own.back().parameter = parameter;
    }
    named(name + ": ", [&] { wrapper.load_state_slices(std::move(own)); });
  }
}

std::vector<size_t> ModelsWrapper::saved_shards() {
  std::vector<size_t> all;
  size_t first = 0;
  for (const auto& [name, wrapper] : models_) {
    for (const size_t shard : wrapper.saved_shards()) all.push_back(first + shard);
    first += wrapper.shards().size();
  }
  return all;
}

std::shared_ptr<void> ModelsWrapper::whole_on_rank0() {
  auto all = std::make_shared<std::vector<std::shared_ptr<void>>>();
  for (const auto& [name, wrapper] : models_) all->push_back(wrapper.whole_on_rank0());
  return all;
}

at::Tensor ModelsWrapper::whole_parameter(const std::string& name, int to) {
  const auto [model, parameter] = split(name);
  for (const auto& [known, wrapper] : models_)
    if (known == model) return wrapper.whole_parameter(parameter, to);
  throw UsageError("ModelWrapper.whole_parameter(): no parameter " + name);
}

void ModelsWrapper::load_extra_state(const Tensors& state) {
  for (const auto& [name, wrapper] : models_) {
    Tensors own;
    for (const auto& [key, tensor] : state)
      if (const auto [model, rest] = split(key); model == name) own.emplace_back(rest, tensor);
    wrapper.load_extra_state(own);
  }
}

MemoryUse ModelsWrapper::memory() {
  MemoryUse sum;
  for (const auto& [name, wrapper] : models_) {
    const MemoryUse use = wrapper.memory();
    sum.parameters += use.parameters;
    sum.gradients += use.gradients;
    sum.optimizer_state += use.optimizer_state;
  }
  return sum;
}

}  // namespace tessera::train
