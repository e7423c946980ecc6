#include "tessera/wrap_policy.h"

#include <sstream>

#include <fmt/format.h>

#include "tessera/detail/nearest.h"
#include "tessera/error.h"

namespace tessera {
namespace {

bool matches(const char* pattern, const char* name) {
  if (*pattern == '\0') return *name == '\0';
  if (*pattern == '*') {
    const bool dots = pattern[1] == '*';
    const char* rest = pattern + (dots ? 2 : 1);
    for (const char* at = name;; ++at) {
      if (matches(rest, at)) return true;
      if (*at == '\0' || (*at == '.' && !dots)) return false;
    }
  }
  return *name != '\0' && (*pattern == '?' || *pattern == *name) && matches(pattern + 1, name + 1);
}

void allow(const std::string& policy, const OptionMap& options,
           const std::vector<std::string>& known) {
  for (const auto& [name, value] : options) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      throw UsageError(fmt::format("wrap policy {}: unknown option {}{}", policy, name,
                                   did_you_mean(name, known)));
    }
  }
}

WrapPolicy size_based(const OptionMap& options) {
  allow("size_based", options, {"min_numel"});
  const auto found = options.find("min_numel");
  if (found == options.end()) return wrap_by_size();
  if (const auto* number = std::get_if<int64_t>(&found->second)) return wrap_by_size(*number);
  const auto* number = std::get_if<double>(&found->second);
  if (!number || *number != std::floor(*number) || std::abs(*number) > 9e18) {
    throw UsageError(fmt::format("wrap policy size_based: min_numel is {}; expected a whole number",
                                 to_string(found->second)));
  }
  return wrap_by_size(static_cast<int64_t>(*number));
}

WrapPolicy name_based(const OptionMap& options) {
  allow("name_based", options, {"patterns"});
  const auto found = options.find("patterns");
  const auto* text = found == options.end() ? nullptr : std::get_if<std::string>(&found->second);
  if (!text)
    throw UsageError(
        "wrap policy name_based: option patterns is missing or no text; expected patterns joined "
        "by commas, as \"blocks.*\"");
  std::vector<std::string> patterns;
  std::istringstream stream(*text);
  for (std::string pattern; std::getline(stream, pattern, ',');) patterns.push_back(pattern);
  return wrap_by_name(std::move(patterns));
}

}  // namespace

WrapPolicy wrap_by_size(int64_t min_numel) {
  if (min_numel <= 0)
    throw UsageError(fmt::format(
        "wrap_by_size: min_numel is {}; expected a positive number of elements", min_numel));
  return [min_numel](torch::nn::Module&, const std::string&, int64_t unwrapped) {
    return unwrapped >= min_numel;
  };
}

WrapPolicy wrap_by_name(std::vector<std::string> patterns) {
  for (const auto& pattern : patterns) {
    if (pattern.empty())
      throw UsageError("wrap_by_name: a pattern is empty; expected one such as \"blocks.*\"");
  }
  if (patterns.empty())
    throw UsageError(
        "wrap_by_name: there are no patterns; expected at least one, such as \"blocks.*\"");
  return [patterns = std::move(patterns)](torch::nn::Module&, const std::string& name, int64_t) {
    return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
      return matches(pattern.c_str(), name.c_str());
    });
  };
}

WrapPolicy wrap_leaves() {
  return [](torch::nn::Module& module, const std::string&, int64_t) {
    return !module.named_parameters(false).is_empty();
  };
}

void WrapPolicyRegistry::add(const std::string& name, Maker make) {
  if (!makers_.emplace(name, std::move(make)).second)
    throw UsageError(fmt::format("wrap policies: the name {} is taken", name));
}

WrapPolicy WrapPolicyRegistry::make(const std::string& name, const OptionMap& options) const {
  const auto found = makers_.find(name);
  if (found == makers_.end())
    throw UsageError(fmt::format("unknown wrap policy {}{}", name, did_you_mean(name, names())));
  return found->second(options);
}

std::vector<std::string> WrapPolicyRegistry::names() const {
  std::vector<std::string> result;
  for (const auto& [name, maker] : makers_) result.push_back(name);
  return result;
}

WrapPolicyRegistry default_wrap_policies() {
  WrapPolicyRegistry registry;
  registry.add("size_based", size_based);
  registry.add("name_based", name_based);
  registry.add("leaves", [](const OptionMap& options) {
    allow("leaves", options, {});
    return wrap_leaves();
  });
  registry.add("none", [](const OptionMap& options) {
    allow("none", options, {});
    return WrapPolicy();
  });
  return registry;
}

}  // namespace tessera
