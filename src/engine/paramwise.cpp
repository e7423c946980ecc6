#include "tessera/step/paramwise.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <torch/nn/functional/instancenorm.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/normalization.h>

#include "tessera/config/option_reader.h"
#include "tessera/detail/nearest.h"
#include "tessera/step/sync_batch_norm.h"

namespace tessera {

namespace {

constexpr const char* kParamwise = "paramwise";

template <class... Types>
bool is_any_of(const torch::nn::Module& module) {
  return (... || (dynamic_cast<const Types*>(&module) != nullptr));
}

bool is_norm(const torch::nn::Module& module) {
  using namespace torch::nn;
  return is_any_of<BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl,
                   InstanceNorm2dImpl, InstanceNorm3dImpl, LayerNormImpl, GroupNormImpl,
                   SyncBatchNormImpl>(module);
}

template <class... Convolutions>
bool is_depth_wise_of(const torch::nn::Module& module) {
  const auto check = [](const auto* conv) {
    return conv != nullptr && conv->options.groups() == conv->options.in_channels() &&
           conv->options.groups() > 1;
  };
  return (... || check(dynamic_cast<const Convolutions*>(&module)));
}

bool is_depth_wise(const torch::nn::Module& module) {
  return is_depth_wise_of<torch::nn::Conv1dImpl, torch::nn::Conv2dImpl, torch::nn::Conv3dImpl>(
      module);
}

/// A parameter and its module.
struct Found {
  std::string path;  ///< Of the module; "" for the root module.
  std::string name;  ///< Of the parameter in its module.
  at::Tensor tensor;
  bool norm, depth_wise;  ///< The kind of the module.

  std::string full_name() const { return path.empty() ? name : path + "." + name; }
  /// The name that custom keys are compared with.
  std::string matched_name() const { return path + "." + name; }
};

void collect(const torch::nn::Module& module, const std::string& path, std::vector<Found>& found) {
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    if (parameter.value().defined()) {
      found.push_back(
          {path, parameter.key(), parameter.value(), is_norm(module), is_depth_wise(module)});
    }
  }
  for (const auto& child : module.named_children())
    collect(*child.value(), path.empty() ? child.key() : path + "." + child.key(), found);
}

std::vector<Found> each_once(std::vector<Found> found, bool bypass_duplicate) {
  std::unordered_map<const void*, std::string> names;
  std::vector<Found> result;
  for (auto& parameter : found) {
    const auto [first, added] =
        names.emplace(parameter.tensor.unsafeGetTensorImpl(), parameter.full_name());
    if (added) {
      result.push_back(std::move(parameter));
    } else if (!bypass_duplicate) {
      throw UsageError(
          fmt::format("{}: parameter {} is the same tensor as {}; expected each tensor once, or "
                      "bypass_duplicate "
                      "= true, which counts it under its first name",
                      kParamwise, parameter.full_name(), first->second));
    }
  }
  return result;
}

/// The custom keys, longest first; equally long ones in alphabetical order.
std::vector<std::string> sorted_keys(const ParamwiseOptions& options) {
  std::vector<std::string> keys;
  for (const auto& [key, wanted] : options.custom_keys) keys.push_back(key);
  std::stable_sort(keys.begin(), keys.end(),
                   [](const auto& a, const auto& b) { return a.size() > b.size(); });
  return keys;
}

/// Adds every sequence of whole parts of a name: "a.b.c" gives a, a.b, a.b.c, b, b.c and c.
void add_runs(const std::string& name, std::set<std::string>& runs) {
  for (size_t begin = 0; begin != std::string::npos;) {
    for (size_t end = name.find('.', begin);; end = name.find('.', end + 1)) {
      runs.insert(name.substr(begin, end - begin));
      if (end == std::string::npos) break;
    }
    const size_t dot = name.find('.', begin);
    begin = dot == std::string::npos ? dot : dot + 1;
  }
}

void check_keys_match(const std::vector<std::string>& keys, const std::vector<Found>& parameters) {
  for (const auto& key : keys) {
    const bool matches =
        std::any_of(parameters.begin(), parameters.end(), [&](const Found& parameter) {
          return parameter.matched_name().find(key) != std::string::npos;
        });
    if (matches) continue;
    std::set<std::string> runs;
    for (const auto& parameter : parameters) add_runs(parameter.full_name(), runs);
    throw UsageError(fmt::format("{}: custom_keys: \"{}\" is part of no parameter's name{}",
                                 kParamwise, key, did_you_mean(key, {runs.begin(), runs.end()})));
  }
}

/// Checks a multiplier if it is given.
void check_multiplier(const std::string& name, const std::optional<double>& multiplier,
                      const char* option, const OptionMap& base) {
  if (!multiplier) return;
  check_option(kParamwise, name, *multiplier, kNotNegative);
  const auto found = base.find(option);
  if (found == base.end()) {
    throw UsageError(fmt::format("{}: option {} = {}, but the optimizer has no {} to multiply",
                                 kParamwise, name, to_string(OptionValue(*multiplier)), option));
  }
  if (!std::holds_alternative<double>(found->second) &&
      !std::holds_alternative<int64_t>(found->second)) {
    throw UsageError(fmt::format("{}: the optimizer's {} = {}, expected a number", kParamwise,
                                 option, to_string(found->second)));
  }
}

void check_multipliers(const ParamwiseOptions& options, const OptionMap& base) {
  check_multiplier("bias_lr_mult", options.bias_lr_mult, "lr", base);
  check_multiplier("bias_decay_mult", options.bias_decay_mult, "weight_decay", base);
  check_multiplier("norm_decay_mult", options.norm_decay_mult, "weight_decay", base);
  check_multiplier("flat_decay_mult", options.flat_decay_mult, "weight_decay", base);
  check_multiplier("dwconv_decay_mult", options.dwconv_decay_mult, "weight_decay", base);
  for (const auto& [key, wanted] : options.custom_keys) {
    if (key.empty())
      throw UsageError(
          fmt::format("{}: custom_keys: an empty key; expected a part of a name", kParamwise));
    check_multiplier("custom_keys." + key + ".lr_mult", wanted.lr_mult, "lr", base);
    check_multiplier("custom_keys." + key + ".decay_mult", wanted.decay_mult, "weight_decay", base);
  }
}

/// Multiplies `values[option]` by the multiplier if it is given.
void multiply(OptionMap& values, const char* option, const std::optional<double>& multiplier) {
  if (multiplier) values[option] = std::get<double>(values.at(option)) * *multiplier;
}

/// Converts integer values to double, so that a rate of 1 equals one of 1.0.
void as_numbers(OptionMap& values) {
  for (const char* option : {"lr", "weight_decay"}) {
    const auto found = values.find(option);
    if (found == values.end()) continue;
    if (const auto* integer = std::get_if<int64_t>(&found->second))
      found->second = static_cast<double>(*integer);
  }
}

std::optional<double> decay_multiplier(const Found& parameter, const ParamwiseOptions& options) {
  if (parameter.norm && options.norm_decay_mult) return options.norm_decay_mult;
  if (parameter.name == "bias" && options.bias_decay_mult) return options.bias_decay_mult;
  if (parameter.depth_wise && options.dwconv_decay_mult) return options.dwconv_decay_mult;
  if (parameter.tensor.dim() == 1) return options.flat_decay_mult;
  return std::nullopt;
}

OptionMap options_of(const Found& parameter, const ParamwiseOptions& options,
                     const std::vector<std::string>& keys, const OptionMap& base) {
  OptionMap values = base;
  as_numbers(values);
  if (!parameter.tensor.requires_grad()) return values;
  const auto key =
      std::find_if(keys.begin(), keys.end(), [name = parameter.matched_name()](const auto& part) {
        return name.find(part) != std::string::npos;
      });
  if (key != keys.end()) {
    const auto& wanted = options.custom_keys.at(*key);
    multiply(values, "lr", wanted.lr_mult);
    multiply(values, "weight_decay", wanted.decay_mult);
    for (const auto& [name, value] : wanted.options) values[name] = value;
    as_numbers(values);
    return values;
  }
  if (parameter.name == "bias" && !parameter.norm) multiply(values, "lr", options.bias_lr_mult);
  multiply(values, "weight_decay", decay_multiplier(parameter, options));
  return values;
}

}  // namespace

std::vector<ParameterGroup> paramwise_groups(const torch::nn::Module& module,
                                             const ParamwiseOptions& options,
                                             const OptionMap& base) {
  check_multipliers(options, base);
  std::vector<Found> found;
  collect(module, "", found);
  const auto keys = sorted_keys(options);
  check_keys_match(keys, found);
  std::vector<ParameterGroup> groups;
  for (const auto& parameter : each_once(std::move(found), options.bypass_duplicate)) {
    auto values = options_of(parameter, options, keys, base);
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& g) { return g.options == values; });
    if (group == groups.end()) group = groups.insert(group, {{}, std::move(values)});
    group->parameters.emplace_back(parameter.full_name(), parameter.tensor);
  }
  return groups;
}

}  // namespace tessera
