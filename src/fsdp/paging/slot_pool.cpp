#include "fsdp/paging/slot_pool.h"

#include <algorithm>

#include "memory/heap.h"

namespace tessera::fsdp {

at::Tensor SlotPool::take(int64_t numel) {
  if (free_.empty()) {
    // A tensor made under the caller's InferenceMode could not be written in training.
    const c10::InferenceMode off(false);
    at::NoGradGuard no_grad;
    const bool shared = group_.backend_name() == "shm" && options_.device().is_cpu();
    free_.push_back(shared ? group_.allocate(capacity_, options_)
                           : at::empty({capacity_}, options_));
    slots_.push_back(free_.back());
  }
  auto slot = free_.back();
  free_.pop_back();
  return slot.narrow(0, 0, numel);
}

void SlotPool::give(const at::Tensor& slot, bool keeps_pages) {
  const auto home = std::find_if(slots_.begin(), slots_.end(), [&](const at::Tensor& each) {
    return each.data_ptr() == slot.data_ptr();
  });
  if (!keeps_pages && home->device().is_cpu())
    memory::return_pages(home->data_ptr(), static_cast<int64_t>(home->nbytes()));
  free_.push_back(*home);
}

}  // namespace tessera::fsdp
