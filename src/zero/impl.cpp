#include "zero/impl.h"

#include <algorithm>

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include "optim/text_of_options.h"
#include "sharding/detection/detection.h"
#include "sharding/shard_state.h"
#include "sharding/shared_memory_of.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "zero/sharded_gradient.h"

namespace tessera {
namespace {

/// The plan of all ranks. Collective.
zero::Plan agreed_plan(ProcessGroup& group, const OptimizerFactory& factory,
                       const ZeroRedundancyOptimizerOptions& options,
                       const std::vector<ZeroRedundancyOptimizer::Group>& groups) {
  const auto prefix = fmt::format("{}: rank {}", zero::kName, group.rank());
  std::vector<sharding::NamedTensor> parameters;
  for (const auto& one : groups)
    for (const auto& [name, tensor] : one.parameters) parameters.push_back({name, tensor});
  zero::Plan plan;
  agree(group, [&] {
    plan = zero::plan_zero(options, zero::setting_of(group, factory, parameters), prefix);
    sharding::check_wire_dtypes(zero::kName, group.rank(), options.wire, parameters);
    if (plan.detects)
      sharding::require_detection(
          fmt::format("{}: option {}", prefix,
                      options.shard_gradients ? "shard_gradients" : "share_parameters"),
          "the option off");
  });
  plan.in_background =
      plan.in_background && !parameters.empty() &&
      sharding::start_detection_for(zero::kName, group.rank(), "parameters", "overlap background");
  for (const auto& note : plan.notes)
    if (group.rank() == 0) spdlog::info("tessera: {}: {}", zero::kName, note);
  return plan;
}

}  // namespace

ZeroRedundancyOptimizer::Impl::Impl(ZeroRedundancyOptimizer& outer, ProcessGroup the_group,
                                    OptimizerFactory factory, Options the_options,
                                    const std::vector<Group>& groups)
    : group(std::move(the_group)),
      plan(agreed_plan(group, factory, the_options, groups)),
      options(plan.options),
      gradients(sharding::Lanes(plan.early ? group.duplicate() : group, options.wire.gradients,
                                plan.early ? sharding::lanes_between_hosts(group) : 1)),
      shards(group, options, {zero::uses_all_parameters(factory), plan.early, plan.in_background},
             gradients, prefix()),
      local(factory),
      outer_(outer),
      factory_(std::move(factory)),
      beside_ddp_(the_options.reduce_gradients && !options.reduce_gradients) {
  if (options.shard_gradients) {
    mean = std::make_unique<zero::ShardedGradient>(group, gradients, shards, options, prefix());
    return;
  }
  auto own =
      std::make_unique<zero::StepGradient>(group, gradients, plan.early, shards, options, prefix());
  own_gradients = own.get();
  mean = std::move(own);
}

std::string ZeroRedundancyOptimizer::Impl::prefix() const {
  return fmt::format("{}: rank {}", kName, group.rank());
}

std::unique_ptr<torch::optim::OptimizerOptions> ZeroRedundancyOptimizer::Impl::default_options(
    const OptimizerFactory& factory) {
  if (!factory) {
    throw UsageError(std::string(kName) +
                     ": the optimizer factory is empty; expected one, as from "
                     "optimizer_factory<torch::optim::Adam>(…)");
  }
  return zero::example_of(factory)->defaults().clone();
}

void ZeroRedundancyOptimizer::Impl::add_group(Group added) {
  mean->require_local("add_param_group was called");
  mean->hide_placeholders();
  std::vector<sharding::NamedTensor> named;
  std::vector<at::Tensor> tensors;
  for (auto& [name, tensor] : added.parameters) {
    named.push_back({name, tensor});
    tensors.push_back(tensor);
  }
  torch::optim::OptimizerParamGroup param_group(tensors, outer_.defaults().clone());
  set_options(param_group.options(), added.options);
  shards.add_group(outer_.param_groups().size(), std::move(named));
  tessera::add_param_group(outer_, param_group);
}

void ZeroRedundancyOptimizer::Impl::finish_construction(const torch::nn::Module* module) {
  const auto& parameters = shards.parameters();
  auto contract = sharding::signatures(parameters);
  for (size_t i = 0; i < contract.size(); ++i)
    contract[i] = fmt::format("group {}: {}", shards.group_of(i), contract[i]);
  contract.push_back(fmt::format(
      "options: partition {}, bucket view {}, reduce {} in buckets of {} MiB, wire: {}{}{}{}{}",
      partition_name(options.partition), options.parameters_as_bucket_view,
      options.reduce_gradients, options.bucket_cap_mb, to_string(options.wire),
      plan.early ? ", reduce within backward" : "",
      options.shard_gradients ? ", shard gradients" : "",
      options.share_parameters ? ", share parameters" : "",
      plan.in_background ? ", gather in the background" : ""));
  const auto example = zero::example_of(factory_);
  contract.push_back("optimizer " + text_of_class(*example));
  for (auto& line : option_lines()) contract.push_back(std::move(line));
  const std::vector<sharding::NamedTensor> added(
      parameters.begin() + static_cast<int64_t>(shards.placed()), parameters.end());
  agree(group, [&] { register_parameters(added); });
  group.check_contract(kName, contract);
  keep_shared_storage(module);
  shards.place_new();
  if (options.broadcast_parameters && !shards.shares()) {
    std::vector<at::Tensor> tensors;
    for (const auto& parameter : added) tensors.push_back(parameter.tensor);
    group.broadcast(tensors, 0);
    shards.bump_versions();  // on rank 0 too: another optimizer's ranks see the same writes
  }
  make_local_optimizer();
  mean->watch();
}

/// One line for each parameter group.
std::vector<std::string> ZeroRedundancyOptimizer::Impl::option_lines() const {
  std::vector<std::string> lines;
  for (const auto& visible : outer_.param_groups()) {
    lines.push_back(fmt::format("options of group {}: {}", lines.size(),
                                text_of_options(get_options(visible.options()))));
  }
  return lines;
}

std::string ZeroRedundancyOptimizer::Impl::option_text() const {
  return fmt::format("{}", fmt::join(option_lines(), "; "));
}

void ZeroRedundancyOptimizer::Impl::check_groups() {
  std::vector<size_t> known;
  for (size_t i = 0; i < shards.parameters().size(); ++i) {
    known.resize(std::max(known.size(), shards.group_of(i) + 1));
    ++known[shards.group_of(i)];
  }
  const auto& groups = outer_.param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    const size_t expected = g < known.size() ? known[g] : 0;
    if (groups[g].params().size() == expected) continue;
    group.fail(fmt::format(
        "{}: parameter group {} has {} parameters, of which {} are sharded: the others would never "
        "be updated; expected add_param_group(ZeroRedundancyOptimizer::Group) for new parameters",
        prefix(), g, groups[g].params().size(), expected));
  }
}

void ZeroRedundancyOptimizer::Impl::track_buffers(const torch::nn::Module& module) {
  const bool elsewhere = zero::is_reduced_by_ddp(shards.parameters());
  no_module = false;
  buffers = sharding::ModuleBuffers(module, elsewhere ? BufferSync::none : options.buffers);
  group.check_contract(kName, buffers.signatures());
  if (options.broadcast_parameters) buffers.broadcast(group, 0);
}

/// Local.
void ZeroRedundancyOptimizer::Impl::register_parameters(
    const std::vector<sharding::NamedTensor>& added) {
  for (const auto& parameter : added) {
    if (!beside_ddp_ || !parameter.tensor.requires_grad() || zero::is_reduced_by_ddp({parameter}))
      continue;
    throw UsageError(
        fmt::format("{}: DistributedDataParallel reduces the gradients of some parameters, and not "
                    "that of parameter {}; expected all in one DistributedDataParallel, an "
                    "optimizer of its own for the others, or reduce_gradients = false if their "
                    "gradients are averaged elsewhere",
                    prefix(), parameter.name));
  }
  const auto use =
      options.reduce_gradients ? sharding::Use::reduces_in_step : sharding::Use::updates;
  wrapped_.emplace_back(kName, group.rank(), use, added);
  if (!options.parameters_as_bucket_view) sharding::Page::check_orphan_writes(added);
}

/// A tensor that shares memory with a parameter would keep the present values if the parameter
/// moved into a bucket. Ranks may differ in this, because their programs may hold other tensors, so
/// they agree here. Collective.
void ZeroRedundancyOptimizer::Impl::keep_shared_storage(const torch::nn::Module* module) {
  const auto& parameters = shards.parameters();
  const bool moves = options.parameters_as_bucket_view;
  const bool must_move = options.share_parameters || options.wire.parameters != WireFormat::float32;
  std::vector<int> flags(parameters.size());
  std::string first;
  agree(group, [&] {
    for (const auto& entry : sharding::shared_memory_of(parameters, module)) {
      const size_t i = entry.parameter;
      const auto& tensor = parameters[i].tensor;
      const auto text =
          fmt::format("parameter {} shares its memory with {}", parameters[i].name, entry.holder);
      const auto other = std::find_if(
          parameters.begin(), parameters.end(),
          [&](const auto& parameter) { return entry.holder == "parameter " + parameter.name; });
      if (other != parameters.end()) {
        flags[static_cast<size_t>(other - parameters.begin())] = 1;
        if (tensor.requires_grad() && other->tensor.requires_grad())
          throw UsageError(fmt::format(
              "{}: {}; expected one tensor that is registered under both names", prefix(), text));
      }
      if (i < shards.placed()) continue;
      if (moves && (must_move || !tensor.is_non_overlapping_and_dense()))
        throw UsageError(fmt::format(
            "{}: {}; expected a clone(), or a dense parameter and neither share_parameters nor "
            "wire.parameters",
            prefix(), text));
      if (first.empty() && tensor.requires_grad()) first = text;
      flags[i] = 1;
    }
  });
  if (!moves) return;
  auto ranks = at::tensor(flags, at::kInt).to(group.control_device());
  group.all_reduce(ranks, 1, "parameters that share memory");
  ranks = ranks.cpu();
  for (size_t i = shards.placed(); i < flags.size(); ++i)
    if (ranks[static_cast<int64_t>(i)].item<int>() > 0) shards.keep_storage(i);
  if (first.empty() || group.rank() != 0) return;
  spdlog::info(
      "tessera: {}: {}, so it keeps its storage and is gathered through a copy ({} of {} "
      "parameters)",
      prefix(), first, std::count(flags.begin(), flags.end(), 1), flags.size());
}

void ZeroRedundancyOptimizer::Impl::make_local_optimizer() {
  local.extend(outer_, shards);
  if (local.element_wise() || options.partition != Partition::flat) return;
  throw UsageError(prefix() +
                   ": option partition flat needs an element-wise optimizer, for it cuts "
                   "parameters; this one is not known to be: use partition whole, or "
                   "declare_element_wise<YourOptimizer>()");
}

void ZeroRedundancyOptimizer::Impl::follow_trainability() {
  const auto changed = shards.changed_trainability();
  // All ranks must see the same change. A rank that sees no change makes no comparison.
  if (changed.empty()) return;
  group.check_contract(std::string(kName) + " (a change of requires_grad)", changed);
  const auto thawed = shards.thawed();
  if (!thawed.empty()) {
    const auto& parameters = shards.parameters();
    const auto& first = parameters[thawed[0]].name;
    mean->require_local("parameter " + first + " became trainable");
    const bool has_gradient = std::any_of(thawed.begin(), thawed.end(), [&](size_t i) {
      return parameters[i].tensor.grad().defined();
    });
    if (has_gradient && mean->edited())
      group.fail(fmt::format(
          "{}: the gradients of shards() were changed, and parameter {}, which became trainable, "
          "is "
          "not among them before its first step(); expected no change of them in that step, or "
          "clip_grad_norm_(), which includes it",
          prefix(), first));
    if (zero::uses_all_parameters(factory_))
      throw UsageError(sharding::thawed_text(kName, first, group.rank()));
    if (mean->reducer()) mean->reducer()->check_cleared();
    mean->hide_placeholders();
    shards.place_thawed(thawed);
    make_local_optimizer();
    mean->watch();
    auto owned = shards.owned();
    owned.erase(std::remove_if(owned.begin(), owned.end(),
                               [&](const auto* shard) {
                                 return !std::binary_search(thawed.begin(), thawed.end(),
                                                            shard->parameter);
                               }),
                owned.end());
    sharding::load_shard_state(local.get(), owned, parameters, frozen_state);
    std::vector<StateSlice> slices;
    for (const auto i : thawed) {
      const auto& [name, tensor] = parameters[i];
      const auto frozen = frozen_state.extract(name);
      if (frozen.empty()) continue;
      auto& slice = slices.emplace_back(StateSlice{whole_shard(name, tensor), frozen.mapped()});
      for (auto& [key, values] : slice.state.tensors)
        if (key == sharding::kWireResidual) values = sharding::in_memory_order(values, tensor);
    }
    if (!slices.empty()) shards.take_residuals(slices, false);
  }
  shards.note_trainability();
}

void ZeroRedundancyOptimizer::Impl::check_storage() {
  const auto moved = shards.moved_parameter();
  if (moved.empty()) return;
  group.fail(fmt::format(
      "{}: parameter {} has other storage than at construction (set_data, or module->to(…)?); "
      "construct the optimizer after such changes, and copy values in place",
      prefix(), moved));
}

std::vector<OptimizerStateDict::Group> ZeroRedundancyOptimizer::Impl::groups() const {
  std::vector<OptimizerStateDict::Group> result;
  for (const auto& visible : outer_.param_groups())
    result.push_back({{}, get_options(visible.options())});
  for (size_t i = 0; i < shards.parameters().size(); ++i)
    result[shards.group_of(i)].parameters.push_back(shards.parameters()[i].name);
  return result;
}

OptimizerStateDict ZeroRedundancyOptimizer::Impl::gather_state(int to) {
  at::NoGradGuard no_grad;
  OptimizerStateDict dict;
  dict.groups = groups();
  dict.state =
      sharding::gather_shard_state(local.get(), shards.owned(), shards.parameters(), group, to);
  if (to >= 0 && to != group.rank()) return dict;
  for (auto [name, state] : frozen_state) {
    state.tensors.erase(sharding::kWireResidual);
    if (!state.tensors.empty() || !state.scalars.empty()) dict.state.emplace(name, state);
  }
  return dict;
}

void ZeroRedundancyOptimizer::Impl::load(const OptimizerStateDict& dict) {
  at::NoGradGuard no_grad;
  const auto who = fmt::format("{}.load_state_dict: rank {}", kName, group.rank());
  const auto fail = [&](const std::string& problem) { throw UsageError(who + ": " + problem); };
  const auto& parameters = shards.parameters();
  std::map<std::string, size_t> index;
  std::vector<std::vector<std::string>> names(outer_.param_groups().size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    index[parameters[i].name] = i;
    names[shards.group_of(i)].push_back(parameters[i].name);
  }
  sharding::check_groups(who, names, dict);
  for (const auto& [name, state] : dict.state) {
    const auto found = index.find(name);
    if (found == index.end()) fail(fmt::format("state of unknown parameter {}", name));
    for (const auto& [key, tensor] : state.tensors) {
      const auto& parameter = parameters[found->second].tensor;
      if (local.element_wise() && !tensor.sizes().equals(parameter.sizes()) && tensor.numel() > 1) {
        fail(fmt::format("{} of parameter {} has {} elements; expected {}", key, name,
                         tensor.numel(), parameter.numel()));
      }
    }
  }
  sharding::take_group_options(outer_, dict);
  local.take_options_of(outer_);
  frozen_state.clear();
  for (const auto& [name, state] : dict.state)
    if (!shards.in_bucket(index[name])) frozen_state.emplace(name, state);
  sharding::load_shard_state(local.get(), shards.owned(), parameters, dict.state);
}

std::vector<ParameterShard> ZeroRedundancyOptimizer::Impl::parameter_shards() const {
  return sharding::parameter_shards(shards.owned(), shards.parameters());
}

ZeroRedundancyOptimizer::Memory ZeroRedundancyOptimizer::Impl::memory() const {
  Memory memory;
  if (shards.shares()) memory.parameters = shards.shared()->own_bytes();
  else
    for (const auto& parameter : shards.parameters())
      memory.parameters += static_cast<int64_t>(parameter.tensor.nbytes());
  memory.gradients = mean->bytes() + gradients.bytes();
  if (shards.wire()) memory.parameters += shards.wire()->bytes();
  for (const auto* shard : shards.owned()) {
    const auto state = get_state(local.get(), shard->tensor);
    if (!state) continue;
    for (const auto& [name, tensor] : state->tensors)
      memory.optimizer_state += static_cast<int64_t>(tensor.nbytes());
  }
  return memory;
}

/// [Note: one copy a host]
void ZeroRedundancyOptimizer::Impl::write_shared(const std::function<void()>& write) {
  if (!shards.shared())
    return agree(group, [&] {
      const at::NoGradGuard no_grad;
      write();
    });
  shards.shared()->write(write);
  shards.bump_versions();
  if (shards.shares()) buffers.broadcast(group, 0);
}

}  // namespace tessera
