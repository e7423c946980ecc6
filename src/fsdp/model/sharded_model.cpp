#include "fsdp/model/sharded_model.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>
#include <torch/nn/modules/batchnorm.h>

#include "comm/base/local_work.h"
#include "comm/execution/diverged.h"
#include "comm/group/divergence_scope.h"
#include "comm/group/process_group_impl.h"
#include "deferred/contents.h"
#include "fsdp/model/options.h"
#include "fsdp/model/unit_plan.h"
#include "sharding/bucket.h"
#include "sharding/detection/detection.h"
#include "sharding/gradients/gradient_wire.h"
#include "sharding/module_buffers.h"
#include "sharding/shared_memory_of.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/step/agreement.h"

namespace tessera::fsdp {

namespace {

/// The number of ranks on each host. Every rank throws the same UsageError unless all hosts have
/// the same number and the ranks of a host are consecutive.
int ranks_per_host(const ProcessGroup& world) {
  if (world.same_host()) return world.size();
  const auto place = [](int rank, int size) {
    return fmt::format("local rank {} of {}", rank, size);
  };
  std::string mine;
  agree(world, [&] { mine = place(world.local_rank(), world.local_size()); });
  const auto places = ProcessGroup(world).all_gather_bytes(mine);
  int size = 1;
  while (size < world.size() && places[0] != place(0, size)) ++size;
  for (int r = 0; r < world.size(); ++r) {
    if (places[r] == place(r % size, size)) continue;
    throw UsageError(fmt::format(
        "{}: option shard_group_size is 0, but the ranks are not placed on hosts of equal size: "
        "rank {} is {} on its host, expected {}; set shard_group_size, or start the same number of "
        "consecutive ranks on every host",
        kName, r, places[r], place(r % size, size)));
  }
  return size;
}

int shard_group_size(const FullyShardedDataParallelOptions& options, const ProcessGroup& world) {
  if (options.sharding_strategy == ShardingStrategy::no_shard) return 1;
  if (options.sharding_strategy != ShardingStrategy::hybrid_shard) return world.size();
  const int size = options.shard_group_size == 0 ? ranks_per_host(world) : options.shard_group_size;
  if (size < 1 || world.size() % size != 0) {
    throw UsageError(fmt::format(
        "{}: rank {}: option shard_group_size is {}; expected a divisor of the world size {}",
        kName, world.rank(), size, world.size()));
  }
  return size;
}

/// The dtype in which the model computes with each parameter.
std::vector<at::ScalarType> compute_dtypes(torch::nn::Module& module,
                                           const std::vector<sharding::NamedTensor>& parameters,
                                           const MixedPrecision& mixed) {
  std::unordered_map<const void*, at::ScalarType> beside_buffers;
  for (const auto& each : module.modules()) {
    const bool batch_norm = each->as<torch::nn::BatchNorm1dImpl>() ||
                            each->as<torch::nn::BatchNorm2dImpl>() ||
                            each->as<torch::nn::BatchNorm3dImpl>();
    for (const auto& parameter : batch_norm ? each->parameters(false) : std::vector<at::Tensor>()) {
      beside_buffers[parameter.unsafeGetTensorImpl()] =
          mixed.buffer_dtype.value_or(parameter.scalar_type());
    }
  }
  std::vector<at::ScalarType> result;
  for (const auto& [name, tensor] : parameters) {
    const auto own = tensor.scalar_type();
    const auto found = beside_buffers.find(tensor.unsafeGetTensorImpl());
    if (!at::isFloatingType(own) || !mixed.param_dtype) result.push_back(own);
    else result.push_back(found != beside_buffers.end() ? found->second : *mixed.param_dtype);
  }
  return result;
}

/// Groups the members of a unit into flat parameters: one for each combination of own dtype,
/// compute dtype, device and trainability; trainable ones first.
std::vector<std::vector<size_t>> classes(const std::vector<sharding::NamedTensor>& parameters,
                                         const std::vector<at::ScalarType>& compute,
                                         const std::vector<size_t>& members) {
  std::vector<std::vector<size_t>> result;
  for (const bool trainable : {true, false}) {
    std::map<at::ScalarType, std::vector<size_t>> by_compute;
    for (const auto i : members)
      if (parameters[i].tensor.requires_grad() == trainable) by_compute[compute[i]].push_back(i);
    for (const auto& [dtype, alike] : by_compute)
      for (auto& members_of_one : sharding::by_dtype_and_device(parameters, alike))
        result.push_back(std::move(members_of_one));
  }
  return result;
}

/// The layout of a flat parameter. Sorts `members` into its order: by owner rank if parameters stay
/// whole. `load`: elements that each rank holds already.
sharding::Layout make_layout(const ShardedModel& model, std::vector<size_t>& members,
                             Partition partition, std::vector<int64_t>& load) {
  const auto numel = [&](size_t parameter) { return model.parameters[parameter].tensor.numel(); };
  const int ranks = model.shard_group.size();
  std::vector<int64_t> sizes;
  for (const auto i : members) sizes.push_back(numel(i));
  if (partition == Partition::flat) return sharding::Layout::flat(std::move(sizes), ranks);
  const auto owners = assign_owners(sizes, load, partition);
  std::vector<size_t> by_owner;
  std::vector<int> owners_in_order;
  sizes.clear();
  for (int rank = 0; rank < ranks; ++rank) {
    for (size_t m = 0; m < members.size(); ++m) {
      if (owners[m] != rank) continue;
      by_owner.push_back(members[m]);
      owners_in_order.push_back(rank);
      sizes.push_back(numel(members[m]));
    }
  }
  members = std::move(by_owner);
  return sharding::Layout::owned(std::move(sizes), owners_in_order, ranks);
}

FlatParameter make_flat(ShardedModel& model, std::vector<size_t> members, at::ScalarType compute,
                        const FullyShardedDataParallelOptions& options,
                        std::vector<int64_t>& load) {
  const auto& first = model.parameters[members[0]].tensor;
  FlatParameter flat;
  flat.index = model.flats.size();
  flat.unit = model.units.size();
  const auto dtype = first.scalar_type();
  flat.device = options.device.value_or(first.device());
  flat.trainable = first.requires_grad();
  flat.compute.dtype = compute;
  flat.idle.dtype = dtype;
  flat.reduce =
      at::isFloatingType(dtype) ? options.mixed_precision.reduce_dtype.value_or(compute) : dtype;
  flat.layout = make_layout(model, members, options.partition, load);
  flat.members = std::move(members);
  for (const auto i : flat.members) flat.parameters.push_back(model.parameters[i].tensor);
  const bool offload = options.cpu_offload && !flat.device.is_cpu();
  flat.permanent = model.shard_group.size() == 1 && compute == dtype && !offload;
  auto shard_options =
      first.options().device(offload ? at::Device(at::kCPU) : flat.device).requires_grad(false);
  if (offload) shard_options = shard_options.pinned_memory(true);
  const int rank = model.shard_group.rank();
  const bool keeps_whole = options.partition != Partition::flat || model.shard_group.size() == 1;
  const int64_t begin = flat.layout.segment_begin(rank), end = begin + flat.layout.counts()[rank];
  if (!flat.permanent && compute == dtype && flat.device.is_cpu() && model.shard_group.same_host())
    flat.common = model.shard_group.allocate_common(flat.layout.numel(), shard_options);
  flat.own_segment = flat.common.defined() ? flat.common.narrow(0, begin, end - begin)
                                           : at::empty({end - begin}, shard_options);
  for (size_t m = 0; m < flat.members.size(); ++m) {
    const auto& tensor = flat.parameters[m];
    const int64_t offset = flat.layout.offset(m);
    const int64_t from = std::clamp(offset, begin, end),
                  to = std::clamp(offset + tensor.numel(), begin, end);
    sharding::OwnedShard shard{flat.members[m],
                               std::clamp<int64_t>(from - offset, 0, tensor.numel()),
                               to - from,
                               from - begin,
                               {}};
    const bool whole = keeps_whole && shard.numel == tensor.numel();
    const auto own = [&] {
      return whole ? sharding::window(flat.own_segment, shard.at, tensor)
                   : sharding::window(flat.own_segment, shard.at, shard.numel);
    };
    flat.windows.push_back(own());
    shard.tensor = own();
    shard.tensor.set_requires_grad(tensor.requires_grad());
    flat.shards.push_back(std::move(shard));
  }
  return flat;
}

/// Nothing averages the gradients of an ignored parameter, and parameters() does not have it.
void warn_of_ignored(const torch::nn::Module& module, const UnitPlan& plan, int rank) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : named_parameters(module))
    if (tensor.requires_grad() && std::none_of(plan.parameters.begin(), plan.parameters.end(),
                                               [&tensor = tensor](const auto& known) {
                                                 return known.tensor.is_same(tensor);
                                               }))
      names.push_back(name);
  if (rank == 0 && !names.empty())
    spdlog::warn(
        "tessera: {}: ignored_states contains {} without requires_grad_(false): "
        "parameters() leaves them out and backward does not average their gradients; expected "
        "frozen parameters, or a program that averages and updates these itself",
        kName, fmt::join(names, ", "));
}

/// Makes the shard groups, and the groups of ranks at the same position of each shard group.
void split_world(ShardedModel& model, ProcessGroup group,
                 const FullyShardedDataParallelOptions& options) {
  const int size = shard_group_size(options, group);
  model.shard_group = size == 1              ? ProcessGroup()
                      : size == group.size() ? group
                                             : *group.split(group.rank() / size);
  model.replicas = size == group.size() ? ProcessGroup()
                   : size == 1          ? group
                                        : *group.split(group.rank() % size);
  model.gathers = sharding::Lanes(model.shard_group, options.wire.parameters,
                                  sharding::lanes_between_hosts(model.shard_group));
  model.world = std::move(group);
}

void add_units(ShardedModel& model, torch::nn::Module& module,
               const std::vector<PlannedUnit>& planned_units,
               const FullyShardedDataParallelOptions& options) {
  model.places.resize(model.parameters.size());
  const auto compute = compute_dtypes(module, model.parameters, options.mixed_precision);
  std::vector<int64_t> load(model.shard_group.size(), 0);
  for (const auto& planned : planned_units) {
    Unit unit;
    unit.name = planned.name;
    unit.parent = planned.parent;
    unit.root = model.units.empty();
    auto groups = classes(model.parameters, compute, planned.parameters);
    unit.flats.reserve(groups.size());  // addresses stay
    for (auto& members : groups) {
      const auto dtype = compute[members[0]];
      auto& flat =
          unit.flats.emplace_back(make_flat(model, std::move(members), dtype, options, load));
      model.flats.push_back(&flat);
      for (size_t m = 0; m < flat.members.size(); ++m) model.places[flat.members[m]] = {&flat, m};
    }
    model.units.push_back(std::move(unit));
  }
}

/// Every rank must have the same parameters, units and options.
void check_contract(const torch::nn::Module& module, const UnitPlan& plan, ProcessGroup& group,
                    const FullyShardedDataParallelOptions& options) {
  auto contract = sharding::signatures(plan.parameters);
  for (const auto& unit : plan.units)
    contract.push_back(
        fmt::format("unit \"{}\" of parameters {}", unit.name, fmt::join(unit.parameters, ", ")));
  for (auto& line : sharding::ModuleBuffers(module, options.buffers).signatures())
    contract.push_back(std::move(line));
  contract.push_back(option_text(options));
  group.check_contract(kName, contract);
}

/// What is not sharded has its values and is on `device`, if that is set.
void settle(at::Tensor tensor, const std::optional<at::Device>& device, const ProcessGroup& group) {
  comm::run_local_work(group, kName, [&] {
    materialize(tensor);
    if (device && tensor.device() != *device) tensor.set_data(tensor.detach().to(*device));
  });
}

/// The buffers are whole on every rank.
void share_buffers(torch::nn::Module& module, ProcessGroup& group,
                   const std::optional<at::Device>& device, bool from_rank0) {
  std::vector<at::Tensor> tensors;
  for (const auto& buffer : module.buffers()) {
    if (!buffer.defined()) continue;
    settle(buffer, device, group);
    tensors.push_back(buffer);
  }
  if (from_rank0) group.broadcast(tensors, 0);
}

/// An ignored parameter keeps its memory.
void settle_ignored(const torch::nn::Module& module, const UnitPlan& plan,
                    const std::optional<at::Device>& device, const ProcessGroup& group) {
  std::set<const void*> sharded;
  for (const auto& parameter : plan.parameters)
    sharded.insert(parameter.tensor.unsafeGetTensorImpl());
  for (const auto& parameter : module.parameters()) {
    if (sharded.count(parameter.unsafeGetTensorImpl())) continue;
    settle(parameter, device, group);
  }
}

}  // namespace

ShardedModel build_sharded_model(torch::nn::Module& module, ProcessGroup group,
                                 const FullyShardedDataParallelOptions& given) {
  at::NoGradGuard no_grad;
  auto options = given;
  check_options(options, group.rank());
  auto plan = plan_units(module, options.wrap_policy, options.ignored_states);
  sharding::check_parameters(kName, plan.parameters, 0, group.rank());
  warn_of_ignored(module, plan, group.rank());
  ShardedModel model;
  agree(group, [&] {
    sharding::require_detection(fmt::format("{}: rank {}", kName, group.rank()),
                                "a process without that library");
    sharding::check_wire_dtypes(kName, group.rank(), options.wire, plan.parameters);
    options.device = chosen_device(options, group);
    model.wrapped =
        sharding::WrappedParameters(kName, group.rank(), sharding::Use::shards, plan.parameters);
    sharding::Page::check_orphan_writes(plan.parameters);
    for (const auto& [index, holder] : sharding::shared_memory_of(plan.parameters, &module))
      throw UsageError(fmt::format(
          "{}: rank {}: parameter {} shares its memory with {}, which would keep the present "
          "values; expected one tensor registered under both names, a clone(), or a view that "
          "forward makes",
          kName, group.rank(), plan.parameters[index].name, holder));
  });
  check_contract(module, plan, group, options);
  settle_ignored(module, plan, options.device, group);
  share_buffers(module, group, options.device, options.sync_module_states);
  for (const auto& buffer : module.buffers())
    if (buffer.defined() && buffer.is_floating_point())
      model.buffers.push_back({buffer, buffer.scalar_type()});
  convert_buffers(model, options.mixed_precision.buffer_dtype);
  model.parameters = std::move(plan.parameters);
  split_world(model, std::move(group), options);
  add_units(model, module, plan.units, options);
  fill_shards(model, options.sync_module_states);
  return model;
}

std::vector<const sharding::OwnedShard*> ShardedModel::shards() const {
  std::vector<const sharding::OwnedShard*> result;
  for (const auto* flat : flats)
    for (const auto& shard : flat->shards) result.push_back(&shard);
  return result;
}

bool ShardedModel::shares_memory() const {
  return std::any_of(flats.begin(), flats.end(),
                     [](const auto* flat) { return flat->common.defined(); });
}

void ShardedModel::diverge() {
  meet(shard_group);
  diverged = has_diverged = true;
}

void ShardedModel::meet(ProcessGroup& group) {
  if (group.size() == 1) return;
  try {
    // Queued behind the collectives that have begun, which have failed too.
    const comm::DivergenceScope scope;
    group.all_reduce_async(at::zeros({1}), 1, "the ranks use different units").wait();
  } catch (const comm::Diverged&) {  // it has met another collective, on all ranks
  }
  group.impl()->rejoin();
}

}  // namespace tessera::fsdp
