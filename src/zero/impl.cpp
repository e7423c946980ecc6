#include "zero/impl.h"

#include <algorithm>
#include <typeinfo>

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include "optim/text_of_options.h"
#include "sharding/detection/detection.h"
#include "sharding/replace_state.h"
#include "sharding/shard_state.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera {
namespace {

std::unique_ptr<torch::optim::Optimizer> example_of(const OptimizerFactory& factory) {
  return factory({torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{at::zeros({1})})});
}

/// Whether an update of one parameter depends on the others, so that one rank needs all of them.
bool uses_all_parameters(const OptimizerFactory& factory) {
  return dynamic_cast<torch::optim::LBFGS*>(example_of(factory).get()) != nullptr;
}

constexpr const char* kDdp = "DistributedDataParallel";

/// Whether a DistributedDataParallel reduces the gradient of one of `parameters`.
bool is_reduced_by_ddp(const std::vector<sharding::NamedTensor>& parameters) {
  return sharding::WrappedParameters::reducer_of(parameters) == kDdp;
}

std::vector<sharding::NamedTensor> parameters_of(
    const std::vector<ZeroRedundancyOptimizer::Group>& groups) {
  std::vector<sharding::NamedTensor> all;
  for (const auto& group : groups) {
    for (const auto& [name, tensor] : group.parameters) all.push_back({name, tensor});
  }
  return all;
}

}  // namespace

ZeroRedundancyOptimizerOptions ZeroRedundancyOptimizer::Impl::beside_others(
    Options options, const std::vector<Group>& groups, int rank) {
  if (!options.reduce_gradients || !is_reduced_by_ddp(parameters_of(groups))) return options;
  if (options.overlap_with_backward) {
    throw UsageError(fmt::format(
        "{}: rank {}: option overlap_with_backward, and {} reduces these gradients already; "
        "expected one of the two",
        kName, rank, kDdp));
  }
  if (rank == 0) {
    spdlog::info("tessera: {}: {} reduces the gradients, so reduce_gradients is off here", kName,
                 kDdp);
  }
  options.reduce_gradients = false;
  return options;
}

ZeroRedundancyOptimizer::Impl::Impl(ZeroRedundancyOptimizer& outer, ProcessGroup the_group,
                                    OptimizerFactory factory, Options the_options,
                                    const std::vector<Group>& groups)
    : group(std::move(the_group)),
      options(beside_others(the_options, groups, group.rank())),
      early(reduces_early(factory, groups)),
      in_background(gathers_in_background(factory, groups)),
      gradients(sharding::Lanes(group_of_gradients(factory, groups), options.wire.gradients,
                                early ? sharding::lanes_between_hosts(group) : 1)),
      shards({group, gradients, early, group_of_parameters(), in_background}, options,
             uses_all_parameters(factory), prefix()),
      mean(group, gradients, early, shards, options, prefix()),
      local(factory),
      outer_(outer),
      factory_(std::move(factory)),
      beside_ddp_(the_options.reduce_gradients && !options.reduce_gradients),
      overlap_(group, shards, mean, local, norm, outer, options.find_unused_parameters, prefix()) {
  if (!(options.bucket_cap_mb > 0)) {
    throw UsageError(
        fmt::format("{}: option bucket_cap_mb is {}; expected a positive number of MiB", prefix(),
                    options.bucket_cap_mb));
  }
  if (options.overlap_with_backward && !options.reduce_gradients) {
    throw UsageError(prefix() +
                     ": option overlap_with_backward needs reduce_gradients: an update cannot "
                     "follow a reduction that is done elsewhere");
  }
}

/// The group of the gradients' collectives, which are exact: for reductions within backward another
/// one than that of the step's collectives. Collective.
ProcessGroup ZeroRedundancyOptimizer::Impl::group_of_gradients(const OptimizerFactory& factory,
                                                               const std::vector<Group>& groups) {
  agree(group, [&] {
    check_wire(factory, groups);
    check_sharding(factory, groups);
    check_sharing(factory, groups);
  });
  const bool has_own = options.wire.gradients != WireFormat::float32 && !group.same_host();
  return early && !has_own ? group.duplicate() : group;
}

/// The group of the parameters' gathers, if they travel encoded. Collective.
std::optional<ProcessGroup> ZeroRedundancyOptimizer::Impl::group_of_parameters() {
  auto encoded = group.with_wire(options.wire.parameters);
  if (encoded.impl() == group.impl()) return std::nullopt;
  return encoded;
}

void ZeroRedundancyOptimizer::Impl::check_wire(const OptimizerFactory& factory,
                                               const std::vector<Group>& groups) const {
  const auto& wire = options.wire;
  const auto refuse = [&](const char* name, WireFormat format, const char* reason) {
    throw UsageError(
        fmt::format("{}: option wire.{} is {}, and {}", prefix(), name, to_string(format), reason));
  };
  if (wire.gradients != WireFormat::float32 && !options.reduce_gradients) {
    refuse("gradients", wire.gradients,
           "the gradients are reduced elsewhere; expected the option there");
  }
  if (options.overlap_with_backward) {
    const char* const reason = "it excludes overlap_with_backward; expected reduce_in_backward";
    if (wire.gradients != WireFormat::float32) refuse("gradients", wire.gradients, reason);
    if (wire.parameters != WireFormat::float32) refuse("parameters", wire.parameters, reason);
  }
  if (wire.parameters != WireFormat::float32) {
    if (!options.parameters_as_bucket_view)
      refuse("parameters", wire.parameters, "it needs parameters_as_bucket_view");
    if (uses_all_parameters(factory)) {
      refuse("parameters", wire.parameters,
             "this optimizer evaluates the loss within an update; expected float32");
    }
  }
  sharding::check_wire_dtypes(kName, group.rank(), wire, parameters_of(groups));
}

/// [Note: sharded gradients]
void ZeroRedundancyOptimizer::Impl::check_sharding(const OptimizerFactory& factory,
                                                   const std::vector<Group>& groups) const {
  if (!options.shard_gradients) return;
  const auto refuse = [&](const char* reason) {
    throw UsageError(fmt::format("{}: option shard_gradients {}", prefix(), reason));
  };
  const auto all = parameters_of(groups);
  if (is_reduced_by_ddp(all))
    refuse(
        "excludes DistributedDataParallel, which reduces the same gradients; expected one of the "
        "two");
  if (!options.reduce_gradients) refuse("needs reduce_gradients; expected it on");
  if (options.overlap_with_backward)
    refuse("excludes overlap_with_backward; expected one of the two");
  if (options.reduce_in_place)
    refuse("keeps no gradient that a mean could replace; expected reduce_in_place off");
  if (uses_all_parameters(factory))
    refuse("needs an optimizer that does not use all parameters at once");
}

/// [Note: one copy a host]
void ZeroRedundancyOptimizer::Impl::check_sharing(const OptimizerFactory& factory,
                                                  const std::vector<Group>& groups) const {
  if (!options.share_parameters) return;
  const auto refuse = [&](const char* reason) {
    throw UsageError(fmt::format("{}: option share_parameters {}", prefix(), reason));
  };
  if (!options.parameters_as_bucket_view) refuse("needs parameters_as_bucket_view");
  if (options.overlap_with_backward)
    refuse("excludes overlap_with_backward, which writes while other ranks read");
  if (options.gather_in_background)
    refuse(
        "excludes gather_in_background, which takes memory from parameters; expected one of "
        "the two");
  if (options.wire.parameters != WireFormat::float32)
    refuse("needs parameters that travel unrounded; expected wire.parameters float32");
  if (uses_all_parameters(factory))
    refuse("needs an optimizer that does not use all parameters at once");
  const auto parameters = parameters_of(groups);
  if (std::any_of(parameters.begin(), parameters.end(),
                  [](const auto& parameter) { return !parameter.tensor.device().is_cpu(); }))
    refuse("needs parameters on the CPU");
  if (group.size() > 1 && !sharding::start_detection())
    refuse(
        "cannot detect writes, because another library has taken the dispatch key for it; "
        "expected the option off");
}

/// [Note: reduction within backward]
bool ZeroRedundancyOptimizer::Impl::reduces_early(const OptimizerFactory& factory,
                                                  const std::vector<Group>& groups) const {
  const auto parameters = parameters_of(groups);
  const auto refuse = [&](const char* reason) {
    if (!options.reduce_in_backward.value_or(false)) return false;
    throw UsageError(fmt::format("{}: option reduce_in_backward {}", prefix(), reason));
  };
  if (options.shard_gradients) return refuse("is part of shard_gradients; expected one of the two");
  if (!options.reduce_in_backward.value_or(group.messages_between_hosts())) return false;
  if (group.size() == 1 || parameters.empty()) return false;
  if (!options.reduce_gradients) return refuse("needs reduce_gradients");
  if (options.overlap_with_backward)
    return refuse("is part of overlap_with_backward; expected one of the two");
  if (options.reduce_in_place)
    return refuse("keeps the gradients until step(); expected reduce_in_place off");
  if (uses_all_parameters(factory))
    return refuse("needs an optimizer that does not use all parameters at once");
  if (std::any_of(parameters.begin(), parameters.end(),
                  [](const auto& parameter) { return !parameter.tensor.device().is_cpu(); }))
    return refuse(
        "needs parameters on the CPU; expected shard_gradients, which reduces within backward on "
        "any device");
  return true;
}

/// [Note: gathers in the background]
bool ZeroRedundancyOptimizer::Impl::gathers_in_background(const OptimizerFactory& factory,
                                                          const std::vector<Group>& groups) const {
  if (!options.gather_in_background || group.size() == 1) return false;
  const auto parameters = parameters_of(groups);
  const auto refuse = [&](const char* reason) {
    throw UsageError(fmt::format("{}: option gather_in_background {}", prefix(), reason));
  };
  if (!options.parameters_as_bucket_view) refuse("needs parameters_as_bucket_view");
  if (options.overlap_with_backward)
    refuse("excludes overlap_with_backward, which gathers in backward; expected one of the two");
  if (options.wire.parameters != WireFormat::float32)
    refuse("needs parameters that travel unrounded; expected wire.parameters float32");
  if (uses_all_parameters(factory))
    refuse("needs an optimizer that does not use all parameters at once");
  if (std::any_of(parameters.begin(), parameters.end(),
                  [](const auto& parameter) { return !parameter.tensor.device().is_cpu(); }))
    refuse("needs parameters on the CPU");
  if (sharding::start_detection()) return true;
  if (group.rank() == 0) {
    spdlog::warn(
        "tessera: {}: another library has taken the dispatch key that detects the use of "
        "parameters, so gather_in_background is off",
        kName);
  }
  return false;
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
  return example_of(factory)->defaults().clone();
}

void ZeroRedundancyOptimizer::Impl::add_group(Group added) {
  mean.require_local("add_param_group was called");
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

void ZeroRedundancyOptimizer::Impl::finish_construction() {
  const auto& parameters = shards.parameters();
  auto contract = sharding::signatures(parameters);
  for (size_t i = 0; i < contract.size(); ++i)
    contract[i] = fmt::format("group {}: {}", shards.group_of(i), contract[i]);
  contract.push_back(fmt::format(
      "options: partition {}, bucket view {}, reduce {}, overlap {} in buckets of {} MiB, find "
      "unused {}, wire: {}{}{}{}{}",
      partition_name(options.partition), options.parameters_as_bucket_view,
      options.reduce_gradients, options.overlap_with_backward, options.bucket_cap_mb,
      options.find_unused_parameters, to_string(options.wire),
      early ? ", reduce within backward" : "", options.shard_gradients ? ", shard gradients" : "",
      options.share_parameters ? ", share parameters" : "",
      in_background ? ", gather in the background" : ""));
  const auto example = example_of(factory_);
  contract.push_back("optimizer " + c10::demangle(typeid(*example).name()));
  for (auto& line : option_lines()) contract.push_back(std::move(line));
  const std::vector<sharding::NamedTensor> added(
      parameters.begin() + static_cast<int64_t>(shards.placed()), parameters.end());
  agree(group, [&] { register_parameters(added); });
  group.check_contract(kName, contract);
  shards.place_new();
  if (options.broadcast_parameters && !shards.shares()) {
    std::vector<at::Tensor> tensors;
    for (const auto& parameter : added) tensors.push_back(parameter.tensor);
    group.broadcast(tensors, 0);
  }
  make_local_optimizer();
  watch();
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
  const bool elsewhere = is_reduced_by_ddp(shards.parameters());
  buffers = sharding::ModuleBuffers(module, elsewhere ? BufferSync::none : options.buffers);
  group.check_contract(kName, buffers.signatures());
  if (options.broadcast_parameters) buffers.broadcast(group, 0);
}

/// Local.
void ZeroRedundancyOptimizer::Impl::register_parameters(
    const std::vector<sharding::NamedTensor>& added) {
  for (const auto& parameter : added) {
    if (!beside_ddp_ || !parameter.tensor.requires_grad() || is_reduced_by_ddp({parameter}))
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
}

void ZeroRedundancyOptimizer::Impl::make_local_optimizer() {
  local.extend(outer_, shards);
  if (local.element_wise()) return;
  const auto refuse = [&](const std::string& option) {
    throw UsageError(fmt::format(
        "{}: {} needs an element-wise optimizer, for it cuts parameters or updates them apart; "
        "this one is not known to be: use partition whole without overlap, or "
        "declare_element_wise<YourOptimizer>()",
        prefix(), option));
  };
  if (options.partition == Partition::flat) refuse("option partition flat");
  if (options.overlap_with_backward) refuse("option overlap_with_backward");
}

void ZeroRedundancyOptimizer::Impl::watch() {
  mean.watch([this](size_t bucket) { overlap_.send(bucket); });
}

bool ZeroRedundancyOptimizer::Impl::repartition_if_trainability_changed() {
  const auto changed = shards.changed_trainability();
  // Ranks must see the same change. Only a rank that saw one compares.
  if (changed.empty()) return false;
  mean.require_local(fmt::format("requires_grad of parameter {} changed", changed[0]));
  group.check_contract(std::string(kName) + " (a change of requires_grad)", changed);
  if (group.rank() == 0) {
    spdlog::warn(
        "tessera: {}: requires_grad of {} parameters changed ({}{}); the partition is "
        "made anew",
        kName, changed.size(), changed[0], changed.size() > 1 ? ", …" : "");
  }
  if (mean.reducer()) mean.reducer()->check_cleared();
  mean.hide_placeholders();
  auto dict = gather_state(-1);
  std::map<size_t, at::Tensor> kept;
  const auto& parameters = shards.parameters();
  const auto grad_of = [&](size_t i) -> at::Tensor& {
    return const_cast<at::Tensor&>(parameters[i].tensor).mutable_grad();
  };
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (grad_of(i).defined()) kept[i] = grad_of(i).clone();
    grad_of(i) = at::Tensor();
  }
  const auto means = mean.whole_means();
  mean.drop_early_sums();
  mean.unwatch();
  mean.drop_segments();
  local.clear();
  shards.place_all();
  make_local_optimizer();
  for (auto& [i, grad] : kept) {
    if (shards.trainable(i)) grad_of(i) = grad;
  }
  watch();  // moves the gradients into the new buckets
  if (options.shard_gradients) mean.take_means(means);
  load(dict);
  return true;
}

void ZeroRedundancyOptimizer::Impl::require_no_update_under_way(const char* call) const {
  if (!overlap_.under_way()) return;
  throw UsageError(
      fmt::format("{}: {} was called between backward and step(), while "
                  "overlap_with_backward updates; expected after step()",
                  prefix(), call));
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
  if (to < 0 || to == group.rank()) dict.state.insert(frozen_state_.begin(), frozen_state_.end());
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
  for (size_t g = 0; g < names.size(); ++g)
    set_options(outer_.param_groups()[g].options(), dict.groups[g].options);
  local.take_options_of(outer_);
  frozen_state_.clear();
  for (const auto& [name, state] : dict.state) {
    if (!shards.trainable(index[name])) frozen_state_.emplace(name, state);
  }
  sharding::load_shard_state(local.get(), shards.owned(), parameters, dict.state);
}

void ZeroRedundancyOptimizer::Impl::load_slices(std::vector<StateSlice>& slices) {
  try {
    sharding::take_state_slices(local.get(), parameter_shards(), slices);
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("{}: {}", prefix(), error.what()));
  }
  shards.take_residuals(slices);
  frozen_state_.clear();
}

std::vector<ParameterShard> ZeroRedundancyOptimizer::Impl::parameter_shards() const {
  return sharding::parameter_shards(shards.owned(), shards.parameters());
}

ZeroRedundancyOptimizer::Memory ZeroRedundancyOptimizer::Impl::memory() const {
  Memory memory;
  if (shards.shares()) memory.parameters = shards.shared()->own_bytes();
  else {
    for (const auto& parameter : shards.parameters())
      memory.parameters += static_cast<int64_t>(parameter.tensor.nbytes());
  }
  memory.gradients = mean.bytes() + gradients.bytes();
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
