#include "tessera/wrap_policy.h"

#include <algorithm>

#include <fmt/format.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include "tessera/detail/name_pattern.h"
#include "tessera/error.h"

namespace tessera {
namespace {

WrapPolicy read_size_based(OptionReader& options) {
  int64_t min_numel = 100'000'000;
  options.read("min_numel", min_numel,
               "a module becomes a unit when this many of its elements are in no unit yet",
               kAtLeastOne);
  options.finish();
  return wrap_by_size(min_numel);
}

WrapPolicy read_name_based(OptionReader& options) {
  std::vector<std::string> patterns;
  options.require("patterns", "a pattern such as \"blocks.*\", or a list of patterns");
  options.read("patterns", patterns,
               "modules whose names match one: * any characters but dots, ** any, ? one");
  options.finish();
  return named(options.at("patterns"), [&] { return wrap_by_name(patterns); });
}

}  // namespace

WrapPolicy wrap_by_size(int64_t min_numel) {
  check_option("wrap_by_size", "min_numel", min_numel, kAtLeastOne);
  return [min_numel](torch::nn::Module& module, const std::string&, int64_t unwrapped) {
    const bool container = dynamic_cast<torch::nn::ModuleListImpl*>(&module) != nullptr ||
                           dynamic_cast<torch::nn::ModuleDictImpl*>(&module) != nullptr;
    return !container && unwrapped >= min_numel;
  };
}

WrapPolicy wrap_by_name(std::vector<std::string> patterns) {
  for (const auto& pattern : patterns)
    if (pattern.empty())
      throw UsageError("wrap_by_name: a pattern is empty; expected one such as \"blocks.*\"");
  if (patterns.empty())
    throw UsageError(
        "wrap_by_name: there are no patterns; expected at least one, such as \"blocks.*\"");
  return [patterns = std::move(patterns)](torch::nn::Module&, const std::string& name, int64_t) {
    return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
      return detail::matches_name(pattern.c_str(), name.c_str());
    });
  };
}

WrapPolicy wrap_leaves() {
  return [](torch::nn::Module& module, const std::string&, int64_t) {
    return !module.named_parameters(false).is_empty();
  };
}

WrapPolicyRegistry default_wrap_policies() {
  WrapPolicyRegistry registry("wrap policy");
  registry.add("size_based", read_size_based, "large modules become units");
  registry.add("name_based", read_name_based, "modules become units by their names");
  registry.add_plan("leaves", wrap_leaves(), "every module with own parameters becomes a unit");
  registry.add_plan("none", WrapPolicy(), "the whole model is one unit");
  return registry;
}

}  // namespace tessera
