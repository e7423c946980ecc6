#include "fsdp/paging/slot_pool.h"

#include <algorithm>

#include "memory/heap.h"
#include "memory/placement_allocator.h"

namespace tessera::fsdp {

at::Tensor SlotPool::take(int64_t numel) {
  if (free_.empty()) {
    // A tensor made under the caller's InferenceMode could not be written in training.
    const c10::InferenceMode off(false);
    at::NoGradGuard no_grad;
    const bool may_share = group_.size() > 1 && options_.device().is_cpu();
    free_.push_back(may_share ? group_.allocate(capacity_, options_)
                              : at::empty({capacity_}, options_));
    slots_.push_back(free_.back());
  }
  auto slot = free_.back();
  free_.pop_back();
  return slot.narrow(0, 0, numel);
}

at::Tensor SlotPool::take_private(int64_t numel) const {
  const c10::InferenceMode off(false);
  return at::empty({numel}, options_);
}

void SlotPool::sort_free() {
  std::vector<at::Tensor> sorted;
  for (const auto& slot : slots_)
    if (std::any_of(free_.begin(), free_.end(), [&](auto& each) { return each.is_same(slot); }))
      sorted.push_back(slot);
  free_ = std::move(sorted);
}

void SlotPool::give(const at::Tensor& slot, bool keeps_pages) {
  const auto found = find(slot);
  if (found == slots_.end()) return;  // of take_private()
  auto& whole = *found;
  restore(whole);
  if (!keeps_pages && whole.device().is_cpu())
    memory::return_pages(whole.data_ptr(), static_cast<int64_t>(whole.nbytes()));
  free_.push_back(whole);
}

void SlotPool::return_pages_of_free() {
  for (const auto& slot : free_)
    if (slot.device().is_cpu())
      memory::return_pages(slot.data_ptr(), static_cast<int64_t>(slot.nbytes()));
}

at::Tensor SlotPool::displace(const at::Tensor& slot, std::vector<at::Tensor> occupied) {
  const auto found = find(slot);
  if (found == slots_.end()) return at::empty({slot.numel()}, options_);
  auto& whole = *found;
  const auto known = std::find_if(displaced_.begin(), displaced_.end(), [&](const Displaced& each) {
    return each.substitute.is_same(whole);
  });
  const auto substitute = at::empty({capacity_}, options_);
  if (known == displaced_.end()) displaced_.push_back({whole, substitute, std::move(occupied)});
  else known->substitute = substitute;  // its memory belongs to the tensors that use it now
  whole = substitute;
  return whole.narrow(0, 0, slot.numel());
}

std::vector<at::Tensor>::iterator SlotPool::find(const at::Tensor& slot) {
  // Not by address: a slot for parameters without elements has none.
  const auto* storage = slot.storage().unsafeGetStorageImpl();
  return std::find_if(slots_.begin(), slots_.end(), [&](const at::Tensor& each) {
    return each.storage().unsafeGetStorageImpl() == storage;
  });
}

void SlotPool::restore(at::Tensor& slot) {
  const auto found = std::find_if(displaced_.begin(), displaced_.end(), [&](const Displaced& each) {
    return each.substitute.is_same(slot);
  });
  if (found == displaced_.end() ||
      std::any_of(found->occupied.begin(), found->occupied.end(), memory::is_placed))
    return;
  slot = found->home;
  displaced_.erase(found);
}

}  // namespace tessera::fsdp
