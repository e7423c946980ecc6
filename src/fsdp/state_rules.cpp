#include "fsdp/state_rules.h"

#include <fmt/format.h>

#include "tessera/detail/nearest.h"
#include "tessera/error.h"

namespace tessera::fsdp {

std::string shape_text(at::IntArrayRef sizes) {
  std::string text = "[";
  for (const auto size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

std::vector<std::pair<std::string, at::Tensor>> buffers(const ShardedModule& core) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& item : core.module.named_buffers()) {
    if (item.value().defined()) result.emplace_back(item.key(), item.value());
  }
  return result;
}

void agree(ShardedModule& core, const std::string& problem) {
  for (const auto& found : core.model.world.all_gather_bytes(problem)) {
    if (!found.empty()) throw UsageError(found);
  }
}

std::string mismatch(const ShardedModule& core,
                     const std::map<std::string, std::vector<int64_t>>& given) {
  std::map<std::string, std::vector<int64_t>> wanted;
  for (const auto& parameter : core.model.parameters)
    wanted[parameter.name] = parameter.tensor.sizes().vec();
  for (const auto& [name, buffer] : buffers(core)) wanted[name] = buffer.sizes().vec();
  std::vector<std::string> names;
  for (const auto& [name, sizes] : wanted) names.push_back(name);
  for (const auto& [name, sizes] : wanted) {
    const auto found = given.find(name);
    if (found == given.end())
      return fmt::format("{}: load_state_dict: {} is missing", core.prefix(), name);
    if (found->second != sizes) {
      return fmt::format("{}: load_state_dict: {} has shape {}; expected {}", core.prefix(), name,
                         shape_text(found->second), shape_text(sizes));
    }
  }
  for (const auto& [name, sizes] : given) {
    if (!wanted.count(name))
      return fmt::format("{}: load_state_dict: the module has no {}{}", core.prefix(), name,
                         did_you_mean(name, names));
  }
  return "";
}

}  // namespace tessera::fsdp
