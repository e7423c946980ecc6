#include "distributed_optimizer/distributed_optimizer_impl.h"

#include <algorithm>
#include <cctype>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

#include "comm/base/local_work.h"
#include "optim/text_of_options.h"
#include "tessera/config/option_reader.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/step/agreement.h"

namespace tessera {

using distributed_optimizer::PackedReduction;

void distributed_optimizer::check_group(const NamedParameters& parameters,
                                        const NamedParameters& known, size_t index, int rank) {
  std::vector<sharding::NamedTensor> named;
  for (const auto& [name, tensor] : parameters) named.push_back({name, tensor});
  sharding::check_parameters("DistributedOptimizer", named, index, rank);
  std::unordered_map<const void*, std::string> name_of;
  std::unordered_set<std::string> names;
  for (const auto& [name, tensor] : known) {
    name_of.emplace(tensor.unsafeGetTensorImpl(), name);
    names.insert(name);
  }
  for (const auto& [name, tensor] : named) {
    const auto same = name_of.find(tensor.unsafeGetTensorImpl());
    if (same == name_of.end() && !names.contains(name)) continue;
    throw UsageError(fmt::format(
        "DistributedOptimizer: rank {}: group {}, parameter {}: already in an earlier group as {}",
        rank, index, name, same == name_of.end() ? name : same->second));
  }
}

DistributedOptimizer::Impl::Impl(std::shared_ptr<torch::optim::Optimizer> optimizer,
                                 const NamedParameters& names,
                                 const std::vector<std::optional<ProcessGroup>>& dist_groups,
                                 Options options)
    : optimizer_(std::move(optimizer)), names_(names), options_(std::move(options)) {
  const auto groups = optimizer_->param_groups().size();
  if (dist_groups.size() != groups) {
    throw UsageError(fmt::format(
        "{}: there are {} dist_groups for {} parameter groups; expected one entry for each (an "
        "empty entry for the world)",
        kName, dist_groups.size(), groups));
  }
  if (groups == 0)
    throw UsageError(fmt::format("{}: the optimizer has no parameter groups; expected one", kName));
  for (size_t g = 0; g < groups; ++g) add_group(g, dist_groups[g] ? *dist_groups[g] : world(g));
  check_options();
  for (auto& synced : synced_) prepare(synced);
  if (options_.bcast_period >= 0) broadcast(0);
  make_reduction();
}

/// Checks a parameter group and computes deferred parameters. Collective.
void DistributedOptimizer::Impl::prepare(SyncedGroup& synced) {
  agree(synced.group, [&] {
    const int rank = synced.group.rank();
    sharding::refuse_parameter_wire(kName, rank, options_.wire);
    sharding::check_wire_dtypes(kName, rank, options_.wire, synced.trainable);
    wrapped_.emplace_back(kName, rank, sharding::Use::reduces_in_backward, synced.trainable);
    sharding::Page::check_orphan_writes(synced.trainable);
  });
  check_contract(synced);
  comm::run_local_work(synced.group, kName, [&] {
    for (const auto& tensor : synced.tensors) materialize(tensor);
  });
}

/// The dist_group of a parameter group for which the caller gave none.
ProcessGroup DistributedOptimizer::Impl::world(size_t index) {
  if (auto world = default_process_group()) return *world;
  throw UsageError(fmt::format(
      "{}: group {} has no dist_group, and this process has no world of init_process_group(); "
      "expected a dist_group, or ProcessGroup() for parameters that are not synchronised",
      kName, index));
}

std::string DistributedOptimizer::Impl::prefix() const {
  return synced_.empty() ? kName : fmt::format("{}: rank {}", kName, synced_[0].group.rank());
}

void DistributedOptimizer::Impl::add_group(size_t index, ProcessGroup group) {
  std::unordered_map<const void*, std::string> name_of;
  for (const auto& [name, tensor] : names_) name_of.emplace(tensor.unsafeGetTensorImpl(), name);
  const auto& tensors = optimizer_->param_groups()[index].params();
  std::vector<sharding::NamedTensor> named;
  for (const auto& tensor : tensors) {
    const auto found = name_of.find(tensor.unsafeGetTensorImpl());
    if (tensor.defined() && found == name_of.end()) {
      throw UsageError(fmt::format(
          "{}: group {}, parameter {}: it has no name; expected a name for each parameter of the "
          "optimizer",
          kName, index, named.size()));
    }
    named.push_back({found == name_of.end() ? "?" : found->second, tensor});
  }
  sharding::check_parameters(kName, named, index, group.rank());
  auto& synced = synced_.emplace_back(SyncedGroup{std::move(group), index, tensors, {}, {}});
  for (auto& parameter : named) {
    auto& same = parameter.tensor.requires_grad() ? synced.trainable : synced.frozen;
    same.push_back(std::move(parameter));
  }
}

void DistributedOptimizer::Impl::check_options() {
  std::string method = options_.reduce_method;
  std::transform(method.begin(), method.end(), method.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  const bool alone = std::all_of(synced_.begin(), synced_.end(), [](const SyncedGroup& synced) {
    return synced.group.size() == 1;
  });
  if (method != "sum" && method != "mean" && !(alone && method.empty())) {
    throw UsageError(fmt::format("{}: option reduce_method is \"{}\"; expected \"sum\" or \"mean\"",
                                 prefix(), options_.reduce_method));
  }
  mean_ = method == "mean";
  check_option(prefix(), "bcast_period", options_.bcast_period, Range{-1});
  check_option(prefix(), "param_pack_thd", options_.param_pack_thd, kAtLeastOne);
}

void DistributedOptimizer::Impl::check_contract(SyncedGroup& synced) const {
  auto contract = sharding::signatures(synced.trainable);
  contract.push_back(fmt::format("parameters: {}", synced.tensors.size()));
  contract.push_back(fmt::format(
      "options: reduce_method {}, bcast_period {}, param_pack {}, param_pack_thd {}, "
      "wire: {}, overlap {}",
      mean_ ? "mean" : "sum", options_.bcast_period, options_.param_pack, options_.param_pack_thd,
      to_string(options_.wire), static_cast<int>(options_.overlap)));
  contract.push_back("optimizer " + text_of_class(*optimizer_));
  contract.push_back(option_text(synced.parameter_group));
  synced.group.check_contract(kName, contract);
}

std::string DistributedOptimizer::Impl::option_text(size_t parameter_group) const {
  const auto& options = optimizer_->param_groups()[parameter_group].options();
  return fmt::format("options of group {}: {}", parameter_group,
                     text_of_options(get_options(options)));
}

bool DistributedOptimizer::Impl::reduces(const SyncedGroup& synced) const {
  const bool distributed = std::any_of(synced_.begin(), synced_.end(),
                                       [](const auto& each) { return each.group.size() > 1; });
  const bool alone = distributed && synced.group.size() == 1;  // not synchronised on purpose
  return !synced.trainable.empty() && !alone;
}

void DistributedOptimizer::Impl::make_reduction() {
  std::vector<sharding::NamedTensor> parameters;
  std::vector<PackedReduction::Group> groups;
  std::vector<distributed_optimizer::ThawedGradients::Group> frozen;
  for (const auto& synced : synced_) {
    if (synced.group.size() > 1) frozen.push_back({synced.group, synced.frozen});
    if (!reduces(synced)) continue;
    std::vector<size_t> members;
    for (const auto& parameter : synced.trainable) {
      members.push_back(parameters.size());
      parameters.push_back(parameter);
    }
    groups.push_back({synced.group, synced.parameter_group, std::move(members)});
  }
  thawed_.emplace(std::move(frozen));
  if (groups.empty()) return;
  reduction_ = std::make_unique<PackedReduction>(
      std::move(parameters), std::move(groups), *thawed_,
      distributed_optimizer::PackedReductionOptions{
          mean_, options_.param_pack, options_.param_pack_thd,
          [this](size_t group) {
            return fmt::format("{}; backward after {} steps", option_text(group), steps_);
          },
          options_.wire.gradients, options_.overlap != Overlap::none, options_.bcast_period <= 0});
  if (join_) reduction_->set_join(*join_);
}

void DistributedOptimizer::Impl::add_param_group(Group added) {
  if (reduction_) reduction_->reducer().check_attached();
  const auto index = synced_.size();
  auto group = added.dist_group ? *added.dist_group : world(index);
  agree(group, [&] {
    if (reduction_ && !reduction_->sync())
      throw UsageError(prefix() +
                       ": add_param_group() was called while no_sync() holds; expected it between "
                       "two steps");
    distributed_optimizer::check_group(added.parameters, names_, index, group.rank());
    std::vector<at::Tensor> tensors;
    for (const auto& item : added.parameters) tensors.push_back(item.second);
    torch::optim::OptimizerParamGroup param_group(std::move(tensors),
                                                  optimizer_->defaults().clone());
    set_options(param_group.options(), added.options);
    tessera::add_param_group(*optimizer_, param_group);
    names_.insert(names_.end(), added.parameters.begin(), added.parameters.end());
    add_group(index, group);
    check_options();
  });
  auto& synced = synced_.back();
  prepare(synced);
  if (options_.bcast_period >= 0) group.broadcast(synced.tensors, 0);
  reduction_.reset();  // before the new one registers its hooks
  if (reduces(synced)) reduce(synced, synced.trainable);
  make_reduction();
  mark_reduced();
}

void DistributedOptimizer::Impl::check_groups() {
  const auto& groups = optimizer_->param_groups();
  if (groups.size() != synced_.size()) {
    synced_[0].group.fail(fmt::format(
        "{}: the optimizer has {} parameter groups, of which {} are known: the gradients of the "
        "others are not reduced; expected add_param_group() of the {}",
        prefix(), groups.size(), synced_.size(), kName));
  }
  for (auto& synced : synced_) {
    const auto now = groups[synced.parameter_group].params().size();
    if (now == synced.tensors.size()) continue;
    synced.group.fail(fmt::format(
        "{}: group {} has {} parameters, and {} at construction: the gradients of the others are "
        "not reduced; construct the {} with all parameters",
        prefix(), synced.parameter_group, now, synced.tensors.size(), kName));
  }
}

std::vector<sharding::NamedTensor> DistributedOptimizer::Impl::take_thawed(SyncedGroup& synced) {
  std::vector<sharding::NamedTensor> thawed;
  std::vector<std::string> names;
  for (auto& parameter : std::exchange(synced.frozen, {})) {
    const bool trains = parameter.tensor.requires_grad();
    if (trains) names.push_back(parameter.name);
    (trains ? thawed : synced.frozen).push_back(std::move(parameter));
  }
  if (thawed.empty()) return {};
  synced.group.check_contract(fmt::format("{} (a change of requires_grad)", kName), names);
  agree(synced.group, [&] {
    const int rank = synced.group.rank();
    sharding::check_parameters(kName, thawed, synced.parameter_group, rank);
    sharding::check_wire_dtypes(kName, rank, options_.wire, thawed);
    wrapped_.emplace_back(kName, rank, sharding::Use::reduces_in_backward, thawed);
  });
  synced.trainable.insert(synced.trainable.end(), thawed.begin(), thawed.end());
  return thawed;
}

void DistributedOptimizer::Impl::follow_thaw(bool reduced) {
  if (reduction_ && !reduction_->sync()) return;
  std::vector<std::pair<SyncedGroup*, std::vector<sharding::NamedTensor>>> thawed;
  for (auto& synced : synced_)
    if (auto parameters = take_thawed(synced); !parameters.empty())
      thawed.emplace_back(&synced, std::move(parameters));
  if (thawed.empty()) return;
  if (reduction_ && !reduced) reduction_->reducer().check_cleared();
  for (auto& [synced, parameters] : thawed) {
    if (!reduced) continue;
    std::erase_if(parameters,
                  [this](const auto& parameter) { return thawed_->has(parameter.name); });
    if (parameters.empty()) continue;
    if (!reduction_) refuse_own_gradients(*synced, parameters);
    reduce(*synced, parameters);
  }
  reduction_.reset();  // before the new one registers its hooks
  make_reduction();
  if (reduced) mark_reduced();
}

/// Gradients that are there when a reduction is made are sums over the ranks already.
void DistributedOptimizer::Impl::mark_reduced() {
  if (!reduction_ || mean_) return;
  size_t next = 0;
  for (const auto& synced : synced_)
    for (size_t i = 0; reduces(synced) && i < synced.trainable.size(); ++i)
      reduction_->reducer().mark_overwritten(next++);
}

/// A change of the gradients before step(), such as clipping, would be each rank's own. Collective.
void DistributedOptimizer::Impl::refuse_own_gradients(
    SyncedGroup& synced, const std::vector<sharding::NamedTensor>& parameters) const {
  agree(synced.group, [&] {
    for (const auto& [name, tensor] : parameters) {
      if (synced.group.size() == 1 || !tensor.grad().defined()) continue;
      throw UsageError(fmt::format(
          "{}: all parameters were frozen, so nothing has reduced the gradient of {} within "
          "backward; expected DistributedOptimizer::backward(loss) in place of loss.backward() in "
          "the first step after a thaw",
          prefix(), name));
    }
  });
}

/// A backward without hooks of `parameters` has ended. Collective.
void DistributedOptimizer::Impl::reduce(
    SyncedGroup& synced, const std::vector<sharding::NamedTensor>& parameters) const {
  const int divisor = join_ ? join_->divisor : synced.group.size();
  distributed_optimizer::reduce_gradients(synced.group, parameters, mean_ ? 1.0 / divisor : 1);
}

void DistributedOptimizer::Impl::set_join(const JoinIteration& iteration) {
  join_ = iteration;
  if (reduction_) reduction_->set_join(iteration);
  buffers_.set_active(iteration.first_active, iteration.active_ranks);
}

ProcessGroup& DistributedOptimizer::Impl::buffer_group() {
  for (auto& synced : synced_)
    if (synced.group.size() > 1) return synced.group;
  return synced_[0].group;
}

void DistributedOptimizer::Impl::broadcast(int root) {
  for (auto& synced : synced_) synced.group.broadcast(synced.tensors, root);
}

}  // namespace tessera
