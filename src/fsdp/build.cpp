#include "comm/memory.h"
#include "fsdp/core.h"
#include "fsdp/units.h"
#include "sharding/bucket.h"
#include "tessera/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>

namespace tessera::fsdp {

namespace {

int shard_group_size(const FullyShardedDataParallelOptions& options, const ProcessGroup& world) {
  if (options.sharding_strategy == ShardingStrategy::no_shard) return 1;
  if (options.sharding_strategy != ShardingStrategy::hybrid_shard) return world.size();
  int size = options.shard_group_size;
  if (size == 0) {
    const char* local = std::getenv("LOCAL_WORLD_SIZE");
    size = world.same_host() || !local ? world.size() : std::atoi(local);
  }
  if (size < 1 || world.size() % size != 0) {
    throw UsageError(fmt::format("{}: rank {}: option shard_group_size is {}; expected a divisor of the world size {}", Core::kName, world.rank(), size, world.size()));
  }
  return size;
}

/// One flat for each dtype, device and trainability in a unit; trainable ones first.
std::vector<std::vector<size_t>> classes(const std::vector<sharding::NamedTensor>& parameters, const std::vector<size_t>& members) {
  std::vector<size_t> trainable, frozen;
  for (const auto i : members) (parameters[i].tensor.requires_grad() ? trainable : frozen).push_back(i);
  auto result = sharding::by_dtype_and_device(parameters, trainable);
  for (auto& members_of_one : sharding::by_dtype_and_device(parameters, frozen)) result.push_back(std::move(members_of_one));
  return result;
}

Flat make_flat(ShardedModel& model, std::vector<size_t> members, size_t unit, const FullyShardedDataParallelOptions& options) {
  const auto& first = model.parameters[members[0]].tensor;
  Flat flat;
  flat.unit = unit;
  flat.dtype = first.scalar_type();
  flat.device = first.device();
  flat.trainable = first.requires_grad();
  const bool floating = at::isFloatingType(flat.dtype);
  flat.compute = floating ? options.mixed_precision.param_dtype.value_or(flat.dtype) : flat.dtype;
  flat.reduce = floating ? options.mixed_precision.reduce_dtype.value_or(flat.compute) : flat.dtype;
  std::vector<int64_t> sizes;
  for (const auto i : members) sizes.push_back(model.parameters[i].tensor.numel());
  flat.layout = sharding::Layout::flat(std::move(sizes), model.shard_group.size());
  flat.members = std::move(members);
  const bool offload = options.cpu_offload && !flat.device.is_cpu();
  flat.permanent = model.shard_group.size() == 1 && flat.compute == flat.dtype && !offload;
  auto shard_options = first.options().device(offload ? at::Device(at::kCPU) : flat.device).requires_grad(false);
  if (offload) shard_options = shard_options.pinned_memory(true);
  const int rank = model.shard_group.rank();
  const int64_t begin = flat.layout.segment_begin(rank), end = begin + flat.layout.counts()[rank];
  if (!flat.permanent && flat.compute == flat.dtype && flat.device.is_cpu()) flat.common = model.shard_group.allocate_common(flat.layout.numel(), shard_options);
  flat.shard = flat.common.defined() ? flat.common.narrow(0, begin, end - begin) : at::empty({end - begin}, shard_options);
  for (size_t m = 0; m < flat.members.size(); ++m) {
    const auto& tensor = model.parameters[flat.members[m]].tensor;
    const int64_t offset = flat.layout.offset(m);
    const int64_t from = std::clamp(offset, begin, end), to = std::clamp(offset + tensor.numel(), begin, end);
    sharding::OwnedPiece piece{flat.members[m], std::clamp<int64_t>(from - offset, 0, tensor.numel()), to - from, from - begin, {}};
    piece.tensor = sharding::window(flat.shard, piece.at, piece.numel);
    if (piece.numel > 0) piece.tensor.copy_(sharding::in_memory_order(tensor).narrow(0, piece.begin, piece.numel));
    piece.tensor.set_requires_grad(tensor.requires_grad());
    flat.pieces.push_back(std::move(piece));
  }
  return flat;
}

std::string option_text(const FullyShardedDataParallelOptions& options) {
  const auto name = [](const std::optional<at::ScalarType>& dtype) { return dtype ? c10::toString(*dtype) : "as it is"; };
  return fmt::format("options: strategy {}, group of {}, resident_bytes {}, reshard {}, prefetch {} and {}, dtypes {}, {}, {}",
                     static_cast<int>(options.sharding_strategy), options.shard_group_size, options.resident_bytes, options.reshard_after_forward,
                     static_cast<int>(options.backward_prefetch), options.forward_prefetch, name(options.mixed_precision.param_dtype),
                     name(options.mixed_precision.reduce_dtype), name(options.mixed_precision.buffer_dtype));
}

void check_options(const FullyShardedDataParallelOptions& options, int rank) {
  if (options.resident_bytes < 0) {
    throw UsageError(fmt::format("{}: rank {}: option resident_bytes is {}; expected 0 or more", Core::kName, rank, options.resident_bytes));
  }
  const auto check = [&](const char* name, const std::optional<at::ScalarType>& dtype) {
    if (dtype && !at::isFloatingType(*dtype)) {
      throw UsageError(fmt::format("{}: rank {}: option mixed_precision.{} is {}; expected a floating-point dtype", Core::kName, rank, name, c10::toString(*dtype)));
    }
  };
  check("param_dtype", options.mixed_precision.param_dtype);
  check("reduce_dtype", options.mixed_precision.reduce_dtype);
  check("buffer_dtype", options.mixed_precision.buffer_dtype);
}

}  // namespace

ShardedModel Core::build(torch::nn::Module& module, ProcessGroup group, const FullyShardedDataParallelOptions& options) {
  at::NoGradGuard no_grad;
  check_options(options, group.rank());
  auto plan = plan_units(module, options.wrap_policy, options.ignored_modules, options.ignored_parameters);
  sharding::check_parameters(kName, plan.parameters, 0, group.rank());
  auto contract = sharding::signatures(plan.parameters);
  for (const auto& unit : plan.units) contract.push_back(fmt::format("unit \"{}\" of parameters {}", unit.name, fmt::join(unit.parameters, ", ")));
  contract.push_back(option_text(options));
  group.check_contract(kName, contract);
  if (options.sync_module_states) {
    std::vector<at::Tensor> tensors;
    for (const auto& parameter : plan.parameters) tensors.push_back(parameter.tensor);
    for (const auto& buffer : module.buffers()) {
      if (buffer.defined()) tensors.push_back(buffer);
    }
    group.broadcast(tensors, 0);
  }
  if (options.mixed_precision.buffer_dtype) {
    for (auto& buffer : module.buffers()) {
      if (buffer.defined() && buffer.is_floating_point()) buffer.set_data(buffer.detach().to(*options.mixed_precision.buffer_dtype));
    }
  }
  ShardedModel model;
  model.parameters = std::move(plan.parameters);
  model.world = group;
  const int size = shard_group_size(options, group);
  model.shard_group = size == 1 ? ProcessGroup() : size == group.size() ? group : *group.split(group.rank() / size);
  model.replicas = size == group.size() ? ProcessGroup() : size == 1 ? group : *group.split(group.rank() % size);
  model.places.resize(model.parameters.size());
  for (auto& planned : plan.units) {
    Unit unit;
    unit.name = planned.name;
    unit.parent = planned.parent;
    unit.root = model.units.empty();
    for (auto& members : classes(model.parameters, planned.parameters)) {
      unit.flats.push_back(model.flats.size());
      model.flats.push_back(make_flat(model, std::move(members), model.units.size(), options));
      const auto& flat = model.flats.back();
      for (size_t m = 0; m < flat.members.size(); ++m) model.places[flat.members[m]] = {unit.flats.back(), m};
      if (!flat.permanent) unit.gathered_bytes += flat.gathered_bytes();
    }
    model.units.push_back(std::move(unit));
  }
  return model;
}

SlotPool* Core::pool(int64_t capacity, at::TensorOptions slot_options, bool root, bool for_gradients) {
  const PoolKey key{c10::typeMetaToScalarType(slot_options.dtype()), slot_options.device(), root, for_gradients};
  for (size_t i = 0; i < pool_keys_.size(); ++i) {
    if (!root && pool_keys_[i] == key) return pools_[i].get();
  }
  pool_keys_.push_back(key);
  pools_.push_back(std::make_unique<SlotPool>(model.shard_group, capacity, slot_options));
  return pools_.back().get();
}

/// From here on the module's parameters have no memory of their own.
void Core::make_pages() {
  at::NoGradGuard no_grad;
  for (const auto& parameter : model.parameters) {
    shapes_.push_back(at::empty_strided(parameter.tensor.sizes(), parameter.tensor.strides(), at::TensorOptions().device(at::kMeta)));
  }
  const auto largest = [&](const auto& like, auto options_of) {
    int64_t numel = 0;
    for (const auto& flat : model.flats) {
      const bool same = options_of(flat).dtype() == options_of(like).dtype() && flat.device == like.device && !model.units[flat.unit].root;
      if (same) numel = std::max(numel, flat.layout.numel());
    }
    return model.units[like.unit].root ? like.layout.numel() : numel;
  };
  for (size_t f = 0; f < model.flats.size(); ++f) {
    auto& flat = model.flats[f];
    const bool root = model.units[flat.unit].root;
    const auto page_options = [](const Flat& each) { return each.page_options(); };
    const auto gradient_options = [](const Flat& each) { return each.gradient_options(); };
    if (!flat.permanent && !flat.common.defined()) flat.slots = pool(largest(flat, page_options), flat.page_options(), root, false);
    // The root's parameters are often given back before its gradients need room: see Gradients::Pending::patient.
    if (root && flat.slots && flat.reduce == flat.compute) flat.gradient_slots = flat.slots;
    else if (flat.trainable) flat.gradient_slots = pool(largest(flat, gradient_options), flat.gradient_options(), root, true);
    if (!flat.permanent) {
      flat.page = std::make_unique<Page>(residency.get(), f, flat.layout.numel(), flat.page_options(), detection);
    }
    const NoDetection unseen;
    for (size_t m = 0; m < flat.members.size(); ++m) restore(flat, m);
  }
  comm::return_freed_memory();
}

void Core::restore(const Flat& flat, size_t m) {
  auto& parameter = model.parameters[flat.members[m]].tensor;
  const auto& like = shapes_[flat.members[m]];
  parameter.set_data(sharding::window(flat.permanent ? flat.shard : flat.page->flat(), flat.layout.offset(m), like));
}

std::vector<FsdpUnit> Core::units() const {
  std::vector<FsdpUnit> result;
  for (const auto& unit : model.units) {
    FsdpUnit line;
    line.name = unit.name;
    line.gathered_bytes = 0;
    for (const auto f : unit.flats) {
      const auto& flat = model.flats[f];
      line.numel += flat.layout.numel();
      line.sharded_bytes += static_cast<int64_t>(flat.shard.nbytes());
      line.gathered_bytes += flat.gathered_bytes();
      for (const auto i : flat.members) line.parameters.push_back(model.parameters[i].name);
    }
    result.push_back(std::move(line));
  }
  return result;
}

}  // namespace tessera::fsdp
