#include <algorithm>

#include "fsdp/sharded_module.h"
#include "memory/heap.h"
#include "sharding/bucket.h"
#include "sharding/detection/detection.h"

namespace tessera::fsdp {

/// The pool of slots for `flat`. All units of one dtype and device share a pool; the root has its
/// own.
SlotPool* ShardedModule::pool(const FlatParameter& flat,
                              at::TensorOptions (FlatParameter::*options_of)() const,
                              bool for_gradients) {
  const auto slot_options = (flat.*options_of)();
  const bool root = model.units[flat.unit].root;
  int64_t capacity = flat.layout.numel();
  for (const auto& other : model.flats) {
    const bool shares = !root && !model.units[other.unit].root && other.device == flat.device &&
                        (other.*options_of)().dtype() == slot_options.dtype();
    if (shares) capacity = std::max(capacity, other.layout.numel());
  }
  const PoolKey key{c10::typeMetaToScalarType(slot_options.dtype()), slot_options.device(), root,
                    for_gradients};
  for (size_t i = 0; i < pool_keys_.size(); ++i) {
    if (!root && pool_keys_[i] == key) return pools_[i].get();
  }
  pool_keys_.push_back(key);
  pools_.push_back(std::make_unique<SlotPool>(model.shard_group, capacity, slot_options));
  return pools_.back().get();
}

// From here on the module's parameters have no memory of their own.
void ShardedModule::make_pages() {
  at::NoGradGuard no_grad;
  for (const auto& parameter : model.parameters) {
    shapes_.push_back(at::empty_strided(parameter.tensor.sizes(), parameter.tensor.strides(),
                                        at::TensorOptions().device(at::kMeta)));
  }
  for (size_t f = 0; f < model.flats.size(); ++f) {
    auto& flat = model.flats[f];
    make_page(f);
    if (flat.own_segment.device() != flat.device) watch_shards(f);
    // The root's gradients may use the slots of its parameters, which are often released before the
    // gradients need memory: see Gradients::Pending::defer_until_complete.
    if (model.units[flat.unit].root && flat.compute.slots && flat.reduce == flat.compute.dtype)
      flat.gradient_slots = flat.compute.slots;
    else if (flat.trainable)
      flat.gradient_slots = pool(flat, &FlatParameter::gradient_options, true);
    restore(flat);
  }
  // Gradients from before the construction are dropped. Autograd would add to them, and the
  // optimizer, which has only the shards, would not clear them.
  for (auto& parameter : model.parameters) parameter.tensor.mutable_grad() = at::Tensor();
  memory::return_freed_memory();
}

void ShardedModule::make_page(size_t f) {
  auto& flat = model.flats[f];
  if (flat.permanent) return;
  if (!flat.common.defined()) flat.compute.slots = pool(flat, &FlatParameter::page_options, false);
  flat.compute.page = std::make_unique<sharding::Page>(
      residency.get(), f, flat.layout.numel(), flat.page_options(),
      std::string(kName) + ": a parameter of unit " + display_name(model.units[flat.unit]));
}

/// See [Note: shards on the host].
void ShardedModule::watch_shards(size_t f) {
  auto& flat = model.flats[f];
  const sharding::NoDetection no_detection;
  flat.host_page =
      std::make_unique<sharding::Page>(&residency->host_shards(), f, flat.own_segment.numel(),
                                       flat.own_segment.options(), std::string());
  flat.host_page->attach(flat.own_segment);
  for (size_t m = 0; m < flat.shards.size(); ++m) {
    auto& shard = flat.shards[m];
    flat.windows[m] = sharding::window(flat.host_page->flat(), shard.at, shard.tensor);
    shard.tensor.set_data(flat.windows[m]);
  }
}

void ShardedModule::restore(const FlatParameter& flat) {
  const sharding::NoDetection no_detection;
  for (size_t m = 0; m < flat.members.size(); ++m) restore(flat, m);
}

void ShardedModule::restore(const FlatParameter& flat, size_t m) {
  auto& parameter = model.parameters[flat.members[m]].tensor;
  const auto& like = shapes_[flat.members[m]];
  parameter.set_data(sharding::window(flat.permanent ? flat.own_segment : flat.compute.page->flat(),
                                      flat.layout.offset(m), like));
}

std::vector<FsdpUnit> ShardedModule::units() const {
  std::vector<FsdpUnit> result;
  for (const auto& unit : model.units) {
    FsdpUnit line;
    line.name = unit.name;
    line.gathered_bytes = 0;
    for (const auto f : unit.flats) {
      const auto& flat = model.flats[f];
      line.numel += flat.layout.numel();
      line.sharded_bytes += static_cast<int64_t>(flat.own_segment.nbytes());
      line.gathered_bytes += flat.gathered_bytes();
      for (const auto i : flat.members) line.parameters.push_back(model.parameters[i].name);
    }
    result.push_back(std::move(line));
  }
  return result;
}

}  // namespace tessera::fsdp
