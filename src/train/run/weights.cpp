#include "train/run/weights.h"

#include <algorithm>
#include <map>

#include "tessera/error.h"
#include "tessera/optim/optimizer_state_dict.h"

namespace tessera::train {
namespace {

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 5;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i > 0 ? ", " : "") + names[i];
  }
  return text +
         (names.size() > kShown ? " and " + std::to_string(names.size() - kShown) + " more" : "");
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace

void load_weights(torch::nn::Module& module, const std::string& file,
                  const std::vector<SafetensorsEntry>& entries,
                  const std::function<at::Tensor(const std::string& name)>& load) {
  NamedParameters wanted = named_parameters(module);
  for (const auto& buffer : module.named_buffers(true)) {
    wanted.emplace_back(buffer.key(), buffer.value());
  }
  std::map<std::string, const SafetensorsEntry*> there;
  for (const auto& entry : entries) {
    there[entry.name] = &entry;
  }
  std::vector<std::string> missing;
  for (const auto& [name, tensor] : wanted) {
    const auto found = there.find(name);
    if (found == there.end()) {
      missing.push_back(name);
    } else if (found->second->shape != tensor.sizes().vec()) {
      throw UsageError(file + ": " + name + " has shape " + shape_text(found->second->shape) +
                       "; expected " + shape_text(tensor.sizes().vec()) + ", as in the model");
    }
    there.erase(name);
  }
  std::vector<std::string> unexpected;
  for (const auto& [name, entry] : there) {
    unexpected.push_back(name);
  }
  if (!missing.empty() || !unexpected.empty()) {
    throw UsageError(file + ": " + (missing.empty() ? "" : "missing " + listed(missing)) +
                     (missing.empty() || unexpected.empty() ? "" : "; ") +
                     (unexpected.empty() ? "" : "not in the model: " + listed(unexpected)));
  }
  const torch::NoGradGuard no_grad;
  for (auto& [name, tensor] : wanted) {
    tensor.copy_(load(name));
  }
}

void load_weights(torch::nn::Module& module, const std::string& path) {
  const SafetensorsFile file(path);
  load_weights(module, path, file.entries(),
               [&](const std::string& name) { return file.load(name); });
}

}  // namespace tessera::train
