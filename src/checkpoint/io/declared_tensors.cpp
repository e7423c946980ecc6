#include "checkpoint/io/declared_tensors.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "checkpoint/io/safetensors_header.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"

namespace tessera {

using safetensors::in_quotes;

DeclaredTensors::DeclaredTensors(std::string where, std::vector<SafetensorsSpec> tensors)
    : where_(std::move(where)), specs_(std::move(tensors)), written_(specs_.size()) {
  for (size_t i = 0; i < specs_.size(); ++i)
    if (!index_.emplace(specs_[i].name, i).second)
      throw UsageError(where_ + "tensor " + in_quotes(specs_[i].name) + " is given twice");
}

size_t DeclaredTensors::check(const std::string& name, const at::Tensor& tensor) const {
  const std::string who = where_ + "tensor " + in_quotes(name) + " ";
  const auto found = index_.find(name);
  if (found == index_.end()) {
    std::vector<std::string> names;
    for (const auto& spec : specs_) names.push_back(spec.name);
    throw UsageError(who + "was not declared" + did_you_mean(name, names));
  }
  if (written_[found->second]) throw UsageError(who + "is written twice");
  const auto described = [](at::ScalarType dtype, at::IntArrayRef shape) {
    return fmt::format("{} [{}]", c10::toString(dtype), fmt::join(shape, ", "));
  };
  const SafetensorsSpec& spec = specs_[found->second];
  if (!tensor.defined() || tensor.scalar_type() != spec.dtype ||
      tensor.sizes() != at::IntArrayRef(spec.shape))
    throw UsageError(fmt::format("{}is declared as {}, given is {}", who,
                                 described(spec.dtype, spec.shape),
                                 tensor.defined() ? described(tensor.scalar_type(), tensor.sizes())
                                                  : "an undefined tensor"));
  return found->second;
}

void DeclaredTensors::check_complete() const {
  std::vector<std::string> missing;
  for (size_t i = 0; i < specs_.size(); ++i)
    if (!written_[i]) missing.push_back(in_quotes(specs_[i].name));
  if (missing.empty()) return;
  const size_t count = missing.size();
  missing.resize(std::min<size_t>(count, 5));
  throw UsageError(fmt::format("{}commit: {} tensors were not written: {}{}", where_, count,
                               fmt::join(missing, ", "), count > 5 ? ", …" : ""));
}

std::vector<SafetensorsSpec> specs_of(
    const std::string& where, const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  std::vector<SafetensorsSpec> specs;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) throw UsageError(where + "tensor " + in_quotes(name) + " is undefined");
    specs.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  }
  return specs;
}

}  // namespace tessera
