#include "fsdp/unit_pages.h"

#include <algorithm>

#include <fmt/format.h>

#include "memory/heap.h"
#include "sharding/bucket.h"
#include "sharding/detection/detection.h"

namespace tessera::fsdp {

/// The pool of slots for `flat`. All units of one dtype and device share a pool; the root has its
/// own.
SlotPool* UnitPages::pool(const FlatParameter& flat,
                          at::TensorOptions (FlatParameter::*options_of)() const,
                          bool for_gradients) {
  const auto slot_options = (flat.*options_of)();
  const bool root = model_.units[flat.unit].root;
  int64_t capacity = flat.layout.numel();
  for (const auto* other : model_.flats) {
    const bool shares = !root && !model_.units[other->unit].root && other->device == flat.device &&
                        (other->*options_of)().dtype() == slot_options.dtype();
    if (shares) capacity = std::max(capacity, other->layout.numel());
  }
  for (const auto& pool : pools_)
    if (!root && !pool.root && pool.gradients == for_gradients &&
        pool.options.dtype() == slot_options.dtype() && pool.options.device() == flat.device)
      return pool.slots.get();
  pools_.push_back({slot_options, root, for_gradients,
                    std::make_unique<SlotPool>(model_.shard_group, capacity, slot_options)});
  return pools_.back().slots.get();
}

UnitPages::UnitPages(ShardedModel& model, Residency& residency)
    : model_(model), residency_(residency) {
  at::NoGradGuard no_grad;
  for (const auto& parameter : model_.parameters) {
    shapes_.push_back(at::empty_strided(parameter.tensor.sizes(), parameter.tensor.strides(),
                                        at::TensorOptions().device(at::kMeta)));
  }
  for (auto* flat : model_.flats) {
    make(*flat);
    if (flat->on_host()) watch_shards(*flat);
    make_gradients(*flat);
    restore(*flat);
  }
  // Earlier gradients are dropped. Autograd would add to them, and the optimizer, which has only
  // the shards, would not clear them.
  for (auto& parameter : model_.parameters) parameter.tensor.mutable_grad() = at::Tensor();
  memory::return_freed_memory();
}

void UnitPages::make_gradients(FlatParameter& flat) {
  // The root's gradients may use the slots of its parameters, which are often released before the
  // gradients need memory: see FlatGradients::defer_until_complete.
  if (model_.units[flat.unit].root && flat.compute.slots && flat.reduce == flat.compute.dtype)
    flat.gradients.slots = flat.compute.slots;
  else if (flat.trainable)
    flat.gradients.slots = pool(flat, &FlatParameter::gradient_options, true);
}

void UnitPages::make(FlatParameter& flat) {
  if (flat.permanent) return;
  if (!flat.common.defined()) flat.compute.slots = pool(flat, &FlatParameter::page_options, false);
  flat.compute.page = std::make_unique<sharding::Page>(
      &residency_, flat.index, flat.layout.numel(), flat.page_options(),
      fmt::format("{}: a parameter of unit {}", kName, model_.units[flat.unit].display_name()));
}

/// With cpu_offload operators on the shards of `flat` wait until the device has read them: see
/// [Note: shards on the host].
void UnitPages::watch_shards(FlatParameter& flat) {
  const sharding::NoDetection no_detection;
  flat.host_page = std::make_unique<sharding::Page>(&residency_.host_shards(), flat.index,
                                                    flat.own_segment.numel(),
                                                    flat.own_segment.options(), std::string());
  flat.host_page->attach(flat.own_segment);
  for (size_t m = 0; m < flat.shards.size(); ++m) {
    auto& shard = flat.shards[m];
    flat.windows[m] = sharding::window(flat.host_page->flat(), shard.at, shard.tensor);
    shard.tensor.set_data(flat.windows[m]);
  }
}

void UnitPages::restore(const FlatParameter& flat) {
  const sharding::NoDetection no_detection;
  const auto& whole = flat.permanent ? flat.own_segment : flat.compute.page->flat();
  for (size_t m = 0; m < flat.members.size(); ++m) {
    model_.parameters[flat.members[m]].tensor.set_data(
        sharding::window(whole, flat.layout.offset(m), shapes_[flat.members[m]]));
  }
}

}  // namespace tessera::fsdp
