#include "fsdp/large_parameters.h"

#include <algorithm>

#include "memory/heap.h"

namespace tessera::fsdp {

namespace {

constexpr int64_t kLargeParameterBytes = 64 << 20;

}  // namespace

bool is_large(const FlatParameter& flat) {
  return flat.gradients.defer_until_complete &&
         flat.layout.numel() * static_cast<int64_t>(c10::elementSize(flat.reduce)) >=
             kLargeParameterBytes;
}

bool has_large(const ShardedModel& model) {
  return std::any_of(model.flats.begin(), model.flats.end(),
                     [](const auto* flat) { return is_large(*flat); });
}

Unreduced unreduced(const ShardedModel& model) {
  Unreduced left;
  for (const auto* flat : model.flats) {
    if (flat->trainable && !flat->gradients.reduced) ++(is_large(*flat) ? left.large : left.small);
  }
  return left;
}

void return_free_slots(const ShardedModel& model) {
  for (const auto* flat : model.flats) {
    auto* const slots = flat->gradients.slots;
    if (flat->trainable && slots != flat->compute.slots) slots->return_pages_of_free();
  }
}

void return_cleared(const ShardedModel& model) {
  for (const auto* flat : model.flats) {
    const auto& own = flat->gradients.own_segment;
    if (!own.defined() || !flat->device.is_cpu()) continue;
    // The program may hold a gradient that it has cleared.
    const auto& page = flat->gradients.page;
    const auto& storage = (page ? page->flat() : own).storage();
    if (storage.use_count() == 1)
      memory::return_pages(own.data_ptr(), static_cast<int64_t>(own.nbytes()));
  }
}

}  // namespace tessera::fsdp
