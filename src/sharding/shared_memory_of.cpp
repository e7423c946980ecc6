#include "sharding/shared_memory_of.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include <ATen/EmptyTensor.h>
#include <fmt/format.h>

#include "tessera/detail/torch_compat.h"

namespace tessera::sharding {
namespace {

/// A tensor with a name, and its addresses.
struct Placed {
  std::string name;
  at::Tensor tensor;
  std::optional<size_t> parameter;  // its index, if it is one of the given parameters
  const char *begin, *end;
};

c10::StorageImpl* storage_of(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

/// Each tensor that has a name, once.
std::vector<Placed> named_tensors(const std::vector<NamedTensor>& parameters,
                                  const torch::nn::Module* module) {
  std::vector<Placed> result;
  std::unordered_set<const void*> seen;
  const auto add = [&](std::string name, const at::Tensor& tensor, std::optional<size_t> index) {
    if (!tensor.defined() || !tensor.has_storage() ||
        !seen.insert(tensor.unsafeGetTensorImpl()).second)
      return;
    const auto* memory =
        static_cast<const char*>(compat::unchecked_data_ptr(storage_of(tensor)).get());
    if (memory) memory += tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
    const auto bytes =
        at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
    result.push_back({std::move(name), tensor, index, memory, memory ? memory + bytes : nullptr});
  };
  for (size_t i = 0; i < parameters.size(); ++i)
    add("parameter " + parameters[i].name, parameters[i].tensor, i);
  if (!module) return result;
  for (const auto& item : module->named_parameters())
    add("parameter " + item.key(), item.value(), std::nullopt);
  for (const auto& item : module->named_buffers())
    add("buffer " + item.key(), item.value(), std::nullopt);
  return result;
}

void find_overlaps(std::vector<Placed> tensors, std::vector<SharedMemory>& result) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const Placed& a, const Placed& b) { return a.begin < b.begin; });
  const Placed* last = nullptr;  // the one with the highest end address
  for (const auto& tensor : tensors) {
    if (tensor.begin == tensor.end) continue;
    if (last && tensor.begin < last->end) {
      if (tensor.parameter) result.push_back({*tensor.parameter, last->name});
      else if (last->parameter) result.push_back({*last->parameter, tensor.name});
    }
    if (!last || last->end < tensor.end) last = &tensor;
  }
}

/// By storage. A view keeps the tensor that it was made from (`_base()`), which is a holder without
/// a name only if another object holds it too.
std::unordered_map<const void*, size_t> known_holders(const std::vector<Placed>& tensors) {
  std::unordered_map<const void*, size_t> holders, views;
  for (const auto& [name, tensor, parameter, begin, end] : tensors) {
    ++holders[storage_of(tensor)];
    if (!tensor.is_view()) continue;
    const auto& base = tensor._base();
    if (++views[base.unsafeGetTensorImpl()] == base.use_count()) ++holders[storage_of(base)];
  }
  return holders;
}

}  // namespace

std::vector<SharedMemory> shared_memory_of(const std::vector<NamedTensor>& parameters,
                                           const torch::nn::Module* module) {
  const auto tensors = named_tensors(parameters, module);
  std::vector<SharedMemory> result;
  find_overlaps(tensors, result);
  const auto known = known_holders(tensors);
  for (const auto& placed : tensors) {
    if (!placed.parameter) continue;
    auto* const storage = storage_of(placed.tensor);
    const size_t all = placed.tensor.unsafeGetTensorImpl()->unsafe_storage().use_count();
    if (all > known.at(storage)) {
      result.push_back(
          {*placed.parameter,
           fmt::format("{} tensor(s) that the module has not registered (a view that the model "
                       "made in its constructor, such as weight.t() or chunk, or a tensor or graph "
                       "that the program keeps)",
                       all - known.at(storage))});
    }
    if (placed.begin != placed.end && !compat::unchecked_data_ptr(storage).get_context())
      result.push_back({*placed.parameter, "the program, which owns it (from_blob)"});
  }
  return result;
}

}  // namespace tessera::sharding
