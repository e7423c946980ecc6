#include "tessera/module_state_dict.h"

#include <algorithm>
#include <map>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/weights/weights.h"

namespace tessera {
namespace {

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 5;
  const auto shown = static_cast<std::ptrdiff_t>(std::min(names.size(), kShown));
  return fmt::format(
      "{}{}", fmt::join(names.begin(), names.begin() + shown, ", "),
      names.size() > kShown ? fmt::format(" and {} more", names.size() - kShown) : "");
}

/// The module's own tensors.
ModuleStateDict tensors_of(const torch::nn::Module& module) {
  ModuleStateDict tensors;
  for (const auto& [name, parameter] : named_parameters(module))
    if (parameter.defined()) tensors.emplace_back(name, parameter);
  for (const auto& buffer : module.named_buffers(true))
    if (buffer.value().defined()) tensors.emplace_back(buffer.key(), buffer.value());
  return tensors;
}

/// All names of each parameter and buffer, by the tensor: tied ones have several.
std::map<const void*, std::vector<std::string>> all_names(const torch::nn::Module& module) {
  std::map<const void*, std::vector<std::string>> names;
  for (const auto& items : {module.named_parameters(true), module.named_buffers(true)})
    for (const auto& item : items) names[item.value().unsafeGetTensorImpl()].push_back(item.key());
  return names;
}

}  // namespace

ModuleStateDict state_dict(const torch::nn::Module& module) {
  at::NoGradGuard no_grad;
  auto tensors = tensors_of(module);
  for (auto& [name, tensor] : tensors)
    tensor = tensor.detach().to(at::kCPU, tensor.scalar_type(), false, true);
  return tensors;
}

std::vector<SafetensorsEntry> detail::entries_of(const std::string& source,
                                                 const ModuleStateDict& state) {
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, tensor] : state) {
    if (!tensor.defined())
      throw UsageError(fmt::format("{}: {} is undefined; expected a tensor", source, name));
    entries.push_back({name, tensor.is_complex() ? "C64" : "", tensor.sizes().vec()});
  }
  return entries;
}

WeightsMatch detail::match_entries(const torch::nn::Module& module, const std::string& source,
                                   const std::vector<SafetensorsEntry>& entries, bool strict) {
  std::map<std::string, const SafetensorsEntry*> there;
  for (const auto& entry : entries) {
    if (!there.emplace(entry.name, &entry).second)
      throw UsageError(
          fmt::format("{}: {} is given twice; expected each name once", source, entry.name));
  }
  WeightsMatch match;
  auto& [missing, unexpected] = match.unmatched;
  const auto all = all_names(module);
  std::vector<std::string> own;
  for (const auto& [name, tensor] : tensors_of(module)) {
    own.push_back(name);
    if (match.names.count(name) > 0) continue;
    const auto& names = all.at(tensor.unsafeGetTensorImpl());
    std::string from;
    for (const auto& other : names) {
      const auto found = there.find(other);
      if (found == there.end()) continue;
      if (found->second->shape != tensor.sizes().vec())
        throw UsageError(fmt::format("{}: {} has shape [{}]; expected [{}], as in the model",
                                     source, other, fmt::join(found->second->shape, ", "),
                                     fmt::join(tensor.sizes(), ", ")));
      if (found->second->dtype.rfind('C', 0) == 0 && !tensor.is_complex())
        throw UsageError(fmt::format("{}: {} is complex; expected {}, as in the model", source,
                                     other, c10::toString(tensor.scalar_type())));
      if (from.empty()) from = other;
      else match.equal.push_back({from, other, "; expected equal values: the model ties them"});
      there.erase(found);
    }
    if (from.empty()) missing.push_back(name);
    for (const auto& other : names)
      if (!from.empty()) match.names.emplace(other, from);
  }
  for (const auto& [name, entry] : there) unexpected.push_back(name);
  if (strict && (!missing.empty() || !unexpected.empty())) {
    throw UsageError(fmt::format(
        "{}: {}{}{}", source, missing.empty() ? "" : "missing " + listed(missing),
        missing.empty() || unexpected.empty() ? "" : "; ",
        unexpected.empty()
            ? ""
            : "not in the model: " + listed(unexpected) + did_you_mean(unexpected[0], own)));
  }
  return match;
}

void detail::check_equal(const std::string& source, const WeightsMatch& match,
                         const std::function<at::Tensor(const std::string& name)>& load) {
  for (const auto& [first, second, advice] : match.equal) {
    const at::Tensor value = load(first);
    if (!at::equal(value, load(second).to(value.options())))
      throw UsageError(
          fmt::format("{}: \"{}\" differs from \"{}\"{}", source, second, first, advice));
  }
}

WeightsMatch match_weights(const torch::nn::Module& module, const TensorSource& weights,
                           bool strict) {
  return detail::match_entries(module, weights.path(), weights.entries(), strict);
}

UnmatchedNames detail::load_module(
    torch::nn::Module& module, const std::string& source,
    const std::vector<SafetensorsEntry>& entries,
    const std::function<at::Tensor(const std::string& name)>& load, bool strict,
    const std::function<void(const std::string& name, at::Tensor into)>& later) {
  const WeightsMatch match = match_entries(module, source, entries, strict);
  check_equal(source, match, load);
  at::NoGradGuard no_grad;
  for (auto& [own, tensor] : tensors_of(module)) {
    const auto found = match.names.find(own);
    if (found == match.names.end()) continue;
    const auto& name = found->second;
    const auto load_it = [later, name](at::Tensor into) { later(name, std::move(into)); };
    if (!later || !load_later(tensor, load_it)) tensor.copy_(load(name));
  }
  return match.unmatched;
}

UnmatchedNames load_state_dict(torch::nn::Module& module, const ModuleStateDict& state,
                               bool strict) {
  const auto entries = detail::entries_of("load_state_dict", state);
  const std::map<std::string, at::Tensor> by_name(state.begin(), state.end());
  return detail::load_module(
      module, "load_state_dict", entries, [&](const std::string& name) { return by_name.at(name); },
      strict);
}

UnmatchedNames load_state_dict(torch::nn::Module& module, const std::string& path, bool strict) {
  return load_state_dict(module, Weights(path), strict);
}

UnmatchedNames load_state_dict(torch::nn::Module& module, const Weights& weights, bool strict) {
  return detail::load_module(
      module, weights.path(), weights.entries(),
      [&](const std::string& name) { return weights.load(name); }, strict,
      [weights](const std::string& name, at::Tensor into) { weights.load_into(name, into); });
}

}  // namespace tessera
