#include "sharding/shared_memory_of.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include <fmt/format.h>

#include "tessera/detail/torch_compat.h"

namespace tessera::sharding {
namespace {

/// A tensor with a name, and the addresses from its first element to its last.
struct Placed {
  std::string name;
  at::Tensor tensor;
  std::optional<size_t> parameter;  // its index, if it is one of those that are asked about
  const char* begin = nullptr;
  const char* end = nullptr;
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
    Placed placed{std::move(name), tensor, index};
    const auto* base =
        static_cast<const char*>(compat::unchecked_data_ptr(storage_of(tensor)).get());
    if (base && tensor.numel() > 0) {
      int64_t last = tensor.storage_offset();
      placed.begin = base + last * static_cast<int64_t>(tensor.element_size());
      for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
      placed.end = base + (last + 1) * static_cast<int64_t>(tensor.element_size());
    }
    result.push_back(std::move(placed));
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
  std::vector<const Placed*> open;
  for (const auto& tensor : tensors) {
    if (!tensor.begin) continue;
    open.erase(std::remove_if(open.begin(), open.end(),
                              [&](const Placed* other) { return other->end <= tensor.begin; }),
               open.end());
    for (const auto* other : open) {
      if (tensor.parameter) result.push_back({*tensor.parameter, other->name});
      else if (other->parameter) result.push_back({*other->parameter, tensor.name});
    }
    open.push_back(&tensor);
  }
}

/// Storages count their tensors. A view keeps the tensor that it was made from (`_base()`), which
/// is a holder without a name only if something else has it too.
std::unordered_map<const void*, size_t> known_holders(const std::vector<Placed>& tensors) {
  std::unordered_map<const void*, size_t> holders;
  std::unordered_map<const c10::TensorImpl*, size_t> views;
  for (const auto& placed : tensors) {
    ++holders[storage_of(placed.tensor)];
    if (placed.tensor.is_view()) ++views[placed.tensor._base().unsafeGetTensorImpl()];
  }
  for (const auto& placed : tensors) views.erase(placed.tensor.unsafeGetTensorImpl());
  for (const auto& placed : tensors) {
    if (!placed.tensor.is_view()) continue;
    const auto& base = placed.tensor._base();
    const auto found = views.find(base.unsafeGetTensorImpl());
    if (found == views.end()) continue;
    if (base.use_count() <= found->second) ++holders[storage_of(base)];
    views.erase(found);
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
    const auto* storage = storage_of(placed.tensor);
    const size_t all = placed.tensor.unsafeGetTensorImpl()->unsafe_storage().use_count();
    if (all > known.at(storage)) {
      result.push_back(
          {*placed.parameter,
           fmt::format("{} tensor(s) that the module has not registered (a view that the model "
                       "made in its constructor, such as weight.t() or chunk, or a tensor or graph "
                       "that the program keeps)",
                       all - known.at(storage))});
    }
    const auto& data = compat::unchecked_data_ptr(const_cast<c10::StorageImpl*>(storage));
    if (placed.begin && !data.get_context())
      result.push_back({*placed.parameter, "the program, which owns it (from_blob)"});
  }
  return result;
}

}  // namespace tessera::sharding
