#include "distributed_optimizer/distributed_optimizer_impl.h"

#include <algorithm>
#include <cctype>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include <c10/util/Type.h>
#include <fmt/format.h>

#include "comm/base/local_work.h"
#include "optim/text_of_options.h"
#include "tessera/config/option_reader.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/step/agreement.h"

namespace tessera {

using distributed_optimizer::PackedReduction;

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
  for (auto& synced : synced_) {
    agree(synced.group, [&] {
      const int rank = synced.group.rank();
      sharding::refuse_parameter_wire(kName, rank, options_.wire);
      sharding::check_wire_dtypes(kName, rank, options_.wire, synced.trainable);
      wrapped_.emplace_back(kName, synced.group.rank(), sharding::Use::reduces_in_backward,
                            synced.trainable);
      sharding::Page::check_orphan_writes(synced.trainable);
    });
  }
  check_contract();
  for (const auto& synced : synced_) {
    comm::run_local_work(synced.group, kName, [&] {
      for (const auto& tensor : synced.tensors) materialize(tensor);
    });
  }
  if (options_.bcast_period >= 0) broadcast(0);
  make_reduction();
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
  auto& synced = synced_.emplace_back(SyncedGroup{std::move(group), index, tensors, {}});
  for (auto& parameter : named)
    if (parameter.tensor.requires_grad()) synced.trainable.push_back(std::move(parameter));
    else frozen_.push_back(parameter.tensor);
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

void DistributedOptimizer::Impl::check_contract() {
  for (auto& synced : synced_) {
    auto contract = sharding::signatures(synced.trainable);
    contract.push_back(fmt::format("parameters: {}", synced.tensors.size()));
    contract.push_back(fmt::format(
        "options: reduce_method {}, bcast_period {}, param_pack {}, param_pack_thd {}, "
        "wire: {}, overlap {}",
        mean_ ? "mean" : "sum", options_.bcast_period, options_.param_pack, options_.param_pack_thd,
        to_string(options_.wire), static_cast<int>(options_.overlap)));
    const auto& optimizer = *optimizer_;
    contract.push_back("optimizer " + c10::demangle(typeid(optimizer).name()));
    contract.push_back(option_text(synced.parameter_group));
    synced.group.check_contract(kName, contract);
  }
}

std::string DistributedOptimizer::Impl::option_text(size_t parameter_group) const {
  const auto& options = optimizer_->param_groups()[parameter_group].options();
  return fmt::format("options of group {}: {}", parameter_group,
                     text_of_options(get_options(options)));
}

void DistributedOptimizer::Impl::make_reduction() {
  std::vector<sharding::NamedTensor> parameters;
  std::vector<PackedReduction::Group> groups;
  const bool distributed = std::any_of(synced_.begin(), synced_.end(),
                                       [](const auto& synced) { return synced.group.size() > 1; });
  for (const auto& synced : synced_) {
    const bool alone = distributed && synced.group.size() == 1;  // not synchronised on purpose
    if (synced.trainable.empty() || alone) continue;
    std::vector<size_t> members;
    for (const auto& parameter : synced.trainable) {
      members.push_back(parameters.size());
      parameters.push_back(parameter);
    }
    groups.push_back({synced.group, synced.parameter_group, std::move(members)});
  }
  if (groups.empty()) return;
  reduction_ = std::make_unique<PackedReduction>(
      std::move(parameters), std::move(groups),
      distributed_optimizer::PackedReductionOptions{
          mean_, options_.param_pack, options_.param_pack_thd,
          [this](size_t group) {
            return fmt::format("{}; backward after {} steps", option_text(group), steps_);
          },
          options_.wire.gradients, options_.overlap != Overlap::none, options_.bcast_period <= 0});
}

void DistributedOptimizer::Impl::check_groups() {
  const auto& groups = optimizer_->param_groups();
  if (groups.size() != synced_.size()) {
    synced_[0].group.fail(fmt::format(
        "{}: the optimizer has {} parameter groups, and {} at construction: the gradients of a "
        "group that add_param_group() adds later are not reduced; construct the {} with all groups",
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

void DistributedOptimizer::Impl::check_trainability() {
  // A parameter that was frozen has no hook: its gradient would silently stay this rank's own.
  for (const auto& tensor : frozen_) {
    if (!tensor.requires_grad()) continue;
    for (const auto& [name, known] : names_) {
      if (!known.is_same(tensor)) continue;
      synced_[0].group.fail(fmt::format(
          "{}: parameter {} was frozen at construction and requires a gradient now; construct "
          "the optimizer after such changes",
          prefix(), name));
    }
  }
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
