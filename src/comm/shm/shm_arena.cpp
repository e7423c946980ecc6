#include "comm/shm/shm_arena.h"

#include <utility>

namespace tessera::comm {

at::Tensor tensor_at(const std::shared_ptr<const ShmAllocation>& allocation, int r, int64_t offset,
                     at::IntArrayRef sizes, at::TensorOptions options) {
  return at::from_blob(
      allocation->data(r) + offset, sizes,
      [keep = std::shared_ptr<const ShmAllocation>(allocation)](void*) {},
      at::TensorOptions().dtype(options.dtype()).device(at::kCPU));
}

int64_t ShmArena::begin_numbers() {
  std::lock_guard lock(mutex_);
  return groups_++ << 32;
}

at::Tensor ShmArena::adopt(std::shared_ptr<const ShmAllocation> allocation, int64_t numel,
                           at::TensorOptions options) {
  {
    std::lock_guard lock(mutex_);
    std::erase_if(by_start_, [](const auto& entry) { return entry.second.expired(); });
    by_start_[allocation->data(allocation->rank)] = allocation;
  }
  return tensor_at(allocation, allocation->rank, 0, {numel}, options);
}

std::optional<ShmArena::Place> ShmArena::find(const at::Tensor& tensor) const {
  const auto* data = tensor.defined() ? static_cast<const std::byte*>(tensor.data_ptr()) : nullptr;
  if (data == nullptr) return std::nullopt;
  std::lock_guard lock(mutex_);
  auto next = by_start_.upper_bound(data);
  if (next == by_start_.begin()) return std::nullopt;
  const auto allocation = std::prev(next)->second.lock();
  if (!allocation) return std::nullopt;
  const int64_t offset = data - allocation->data(allocation->rank);
  const auto segment_bytes = static_cast<int64_t>(allocation->segments[allocation->rank]->bytes());
  if (offset + static_cast<int64_t>(tensor.nbytes()) > segment_bytes) return std::nullopt;
  return Place{allocation, offset};
}

}  // namespace tessera::comm
