#include "tessera/optim/optimizer_state_dict.h"

#include <unordered_map>
#include <unordered_set>

#include <fmt/format.h>

#include "sharding/shard_state.h"
#include "tessera/error.h"

namespace tessera {

NamedParameters named_parameters(const torch::nn::Module& module) {
  NamedParameters result;
  std::unordered_set<const void*> seen;
  for (const auto& item : module.named_parameters())
    if (!item.value().defined() || seen.insert(item.value().unsafeGetTensorImpl()).second)
      result.emplace_back(item.key(), item.value());
  return result;
}

NamedParameters numbered_parameters(const std::vector<at::Tensor>& parameters) {
  NamedParameters result;
  for (const auto& parameter : parameters)
    result.emplace_back(std::to_string(result.size()), parameter);
  return result;
}

namespace {

NamedParameters numbered_parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups())
    all.insert(all.end(), group.params().begin(), group.params().end());
  return numbered_parameters(all);
}

std::unordered_map<const void*, std::string> names_by_address(const NamedParameters& parameters) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& [name, tensor] : parameters) names.emplace(tensor.unsafeGetTensorImpl(), name);
  return names;
}

std::string name_of(const std::unordered_map<const void*, std::string>& names,
                    const at::Tensor& parameter, size_t group, size_t index) {
  const auto found = names.find(parameter.unsafeGetTensorImpl());
  if (found == names.end()) {
    throw UsageError(
        fmt::format("optimizer state dict: group {}, parameter {} of the optimizer is not among "
                    "the named parameters",
                    group, index));
  }
  return found->second;
}

/// A tensor of an element-wise optimizer has the parameter's shape, or one element (a counter).
void check_shapes(const std::string& name, const at::Tensor& parameter, const ParamState& state,
                  bool element_wise) {
  for (const auto& [key, tensor] : state.tensors) {
    const bool fits = element_wise ? tensor.numel() <= 1 || tensor.sizes().equals(parameter.sizes())
                                   : tensor.dim() <= 1 || tensor.numel() == parameter.numel();
    if (fits) continue;
    throw UsageError(fmt::format("load_state_dict: {} of parameter {} has shape {}; expected {}",
                                 key, name, c10::str(tensor.sizes()), c10::str(parameter.sizes())));
  }
}

}  // namespace

OptimizerStateDict state_dict(const torch::optim::Optimizer& optimizer,
                              const NamedParameters& parameters) {
  at::NoGradGuard no_grad;
  const auto names = names_by_address(parameters);
  OptimizerStateDict dict;
  for (const auto& group : optimizer.param_groups()) {
    auto& entry = dict.groups.emplace_back();
    entry.options = get_options(group.options());
    for (const auto& parameter : group.params()) {
      entry.parameters.push_back(
          name_of(names, parameter, dict.groups.size() - 1, entry.parameters.size()));
      auto state = get_state(optimizer, parameter);
      if (!state) continue;
      for (auto& [key, tensor] : state->tensors)
        tensor = at::empty(tensor.sizes(), tensor.options().device(at::kCPU)).copy_(tensor);
      dict.state.emplace(entry.parameters.back(), std::move(*state));
    }
  }
  return dict;
}

OptimizerStateDict state_dict(const torch::optim::Optimizer& optimizer) {
  return state_dict(optimizer, numbered_parameters_of(optimizer));
}

void load_state_dict(torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict,
                     bool strict) {
  load_state_dict(optimizer, numbered_parameters_of(optimizer), dict, strict);
}

void load_state_dict(torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                     const OptimizerStateDict& given, bool strict) {
  at::NoGradGuard no_grad;
  const auto names = names_by_address(parameters);
  auto& groups = optimizer.param_groups();
  std::vector<std::vector<std::string>> mine(groups.size());
  for (size_t g = 0; g < groups.size(); ++g)
    for (const auto& parameter : groups[g].params())
      mine[g].push_back(name_of(names, parameter, g, mine[g].size()));
  const auto dict = strict ? given : sharding::for_groups(given, mine, optimizer);
  sharding::check_groups("load_state_dict", mine, dict);
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t i = 0; i < mine[g].size(); ++i)
      if (const auto found = dict.state.find(mine[g][i]); found != dict.state.end())
        check_shapes(mine[g][i], groups[g].params()[i], found->second, is_element_wise(optimizer));
  sharding::take_group_options(optimizer, dict);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t i = 0; i < groups[g].params().size(); ++i) {
      const auto& parameter = groups[g].params()[i];
      const auto found = dict.state.find(dict.groups[g].parameters[i]);
      if (found == dict.state.end()) {
        clear_state(optimizer, parameter);
        continue;
      }
      auto state = found->second;
      for (auto& [key, tensor] : state.tensors)
        tensor = tensor.to(parameter.device(), tensor.scalar_type(), false, true);
      set_state(optimizer, parameter, state);
    }
  }
}

}  // namespace tessera
