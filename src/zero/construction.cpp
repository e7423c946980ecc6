#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "tessera/error.h"
#include "zero/impl.h"

namespace tessera {

ZeroRedundancyOptimizer::Impl::Impl(ZeroRedundancyOptimizer& outer, ProcessGroup group,
                                    OptimizerFactory factory, Options options)
    : outer_(outer),
      group_(std::move(group)),
      factory_(std::move(factory)),
      options_(options),
      load_(group_.size(), 0),
      divisor_(group_.size()) {
  if (!(options_.bucket_cap_mb > 0)) {
    throw UsageError(
        fmt::format("{}: option bucket_cap_mb is {}; expected a positive number of MiB", prefix(),
                    options_.bucket_cap_mb));
  }
  if (options_.overlap_with_backward && !options_.reduce_gradients) {
    throw UsageError(prefix() +
                     ": option overlap_with_backward needs reduce_gradients: what is reduced "
                     "elsewhere cannot be followed");
  }
}

std::string ZeroRedundancyOptimizer::Impl::prefix() const {
  return fmt::format("{}: rank {}", kName, group_.rank());
}

std::unique_ptr<torch::optim::OptimizerOptions> ZeroRedundancyOptimizer::Impl::default_options(
    const OptimizerFactory& factory) {
  if (!factory)
    throw UsageError(std::string(kName) +
                     ": the optimizer factory is empty; expected one, as from "
                     "optimizer_factory<torch::optim::Adam>(…)");
  return factory({torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{at::zeros({1})})})
      ->defaults()
      .clone();
}

void ZeroRedundancyOptimizer::Impl::add_group(Group group) {
  std::vector<sharding::NamedTensor> named;
  for (auto& [name, tensor] : group.parameters) named.push_back({name, tensor});
  const auto index = outer_.param_groups().size();
  sharding::check_parameters(kName, named, index, group_.rank());
  for (size_t i = 0; i < named.size(); ++i) {
    for (const auto& known : parameters_) {
      if (!known.tensor.is_same(named[i].tensor) && known.name != named[i].name) continue;
      throw UsageError(
          fmt::format("{}: group {}, parameter {} ({}): already in an earlier group as {}",
                      prefix(), index, i, named[i].name, known.name));
    }
    if (!options_.parameters_as_bucket_view && !named[i].tensor.is_non_overlapping_and_dense()) {
      throw UsageError(
          fmt::format("{}: group {}, parameter {} ({}): its elements are not densely stored, which "
                      "needs parameters_as_bucket_view",
                      prefix(), index, i, named[i].name));
    }
  }
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : named) tensors.push_back(parameter.tensor);
  torch::optim::OptimizerParamGroup param_group(tensors, outer_.defaults().clone());
  set_options(param_group.options(), group.options);
  tessera::add_param_group(outer_, param_group);
  for (auto& parameter : named) {
    parameters_.push_back(std::move(parameter));
    group_of_.push_back(index);
  }
}

void ZeroRedundancyOptimizer::Impl::finish_construction() {
  auto contract = sharding::signatures(parameters_);
  for (size_t i = 0; i < contract.size(); ++i)
    contract[i] = fmt::format("group {}: {}", group_of_[i], contract[i]);
  contract.push_back(
      fmt::format("options: partition {}, bucket view {}, reduce {}, overlap {} in buckets of {} "
                  "MiB, find unused {}",
                  partition_name(options_.partition), options_.parameters_as_bucket_view,
                  options_.reduce_gradients, options_.overlap_with_backward, options_.bucket_cap_mb,
                  options_.find_unused_parameters));
  group_.check_contract(kName, contract);
  const size_t placed = trainable_.size();  // by earlier calls
  if (options_.broadcast_parameters) {
    std::vector<at::Tensor> tensors;
    for (size_t i = placed; i < parameters_.size(); ++i) tensors.push_back(parameters_[i].tensor);
    group_.broadcast(tensors, 0);
  }
  std::vector<size_t> fresh;
  for (size_t i = placed; i < parameters_.size(); ++i) {
    trainable_.push_back(parameters_[i].tensor.requires_grad());
    if (trainable_[i]) fresh.push_back(i);
  }
  make_shard_buckets(fresh);
  extend_local_optimizer();
  rebuild_reducer();
}

std::vector<size_t> ZeroRedundancyOptimizer::Impl::trainable_subset() const {
  std::vector<size_t> subset;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (trainable_[i]) subset.push_back(i);
  }
  return subset;
}

void ZeroRedundancyOptimizer::Impl::make_shard_buckets(const std::vector<size_t>& subset) {
  if (subset.empty()) return;
  zero::ShardPlan plan;
  plan.partition = options_.partition;
  plan.as_bucket_view = options_.parameters_as_bucket_view;
  plan.with_gradients = options_.reduce_gradients;
  if (options_.overlap_with_backward)
    plan.cap_bytes = static_cast<int64_t>(options_.bucket_cap_mb * (1 << 20));
  for (auto& bucket : zero::make_shard_buckets(parameters_, subset, group_of_, plan, load_, group_))
    buckets_.push_back(std::move(bucket));
  for (const auto i : subset) placed_at_[i] = parameters_[i].tensor.data_ptr();
}

/// Local group i is the exposed group i, with this rank's shards.
void ZeroRedundancyOptimizer::Impl::extend_local_optimizer() {
  const auto& exposed = outer_.param_groups();
  std::vector<std::vector<at::Tensor>> shards(exposed.size());
  for (const auto& bucket : buckets_) {
    for (const auto& shard : bucket.shards)
      shards[group_of_[shard.parameter]].push_back(shard.tensor);
  }
  const size_t existing = local_ ? local_->param_groups().size() : 0;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t g = existing; g < exposed.size(); ++g)
    groups.emplace_back(shards[g], exposed[g].options().clone());
  if (local_) {
    for (const auto& group : groups) tessera::add_param_group(*local_, group);
    return;
  }
  local_ = factory_(std::move(groups));
  element_wise_ = is_element_wise(*local_);
  if (element_wise_) return;
  const auto refuse = [&](const std::string& option) {
    throw UsageError(
        fmt::format("{}: {} needs an element-wise optimizer, for it cuts parameters or updates "
                    "them apart; this one is not known to be: "
                    "use partition whole without overlap, or declare_element_wise<YourOptimizer>()",
                    prefix(), option));
  };
  if (options_.partition == Partition::flat) refuse("option partition flat");
  if (options_.overlap_with_backward) refuse("option overlap_with_backward");
}

void ZeroRedundancyOptimizer::Impl::rebuild_reducer() {
  reducer_.reset();
  const auto subset = trainable_subset();
  if (!options_.reduce_gradients || subset.empty()) return;
  std::vector<sharding::NamedTensor> trainable;
  std::vector<size_t> position(parameters_.size(), 0);
  for (const auto i : subset) {
    position[i] = trainable.size();
    trainable.push_back(parameters_[i]);
  }
  std::vector<sharding::Bucket> gradients;
  for (const auto& bucket : buckets_) {
    gradients.push_back(bucket.gradients);
    for (auto& member : gradients.back().members) member = position[member];
  }
  sharding::ReducerOptions options;
  options.component = kName;
  options.find_unused_parameters =
      options_.find_unused_parameters || !options_.overlap_with_backward;
  options.caller_tracks_use = options_.overlap_with_backward;
  position_ = std::move(position);
  reducer_ = std::make_unique<sharding::Reducer>(
      group_, std::move(trainable), std::move(gradients), options,
      sharding::Reducer::Callbacks{[this](size_t bucket) {
                                     if (options_.overlap_with_backward) send_bucket(bucket);
                                   },
                                   [this] {
                                     if (!options_.overlap_with_backward) finish_reduction();
                                   }});
  reducer_->set_sync(options_.overlap_with_backward);
}

void ZeroRedundancyOptimizer::Impl::repartition_if_trainability_changed() {
  std::vector<std::string> changed;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].tensor.requires_grad() != static_cast<bool>(trainable_[i]))
      changed.push_back(parameters_[i].name);
  }
  // All ranks must come to the same conclusion; the agreement is part of check_contract's exchange
  // only when somebody saw a change.
  if (changed.empty()) return;
  group_.check_contract(std::string(kName) + " (a change of requires_grad)", changed);
  if (group_.rank() == 0) {
    spdlog::warn(
        "tessera: {}: requires_grad of {} parameters changed ({}{}); the partition is made anew",
        kName, changed.size(), changed[0], changed.size() > 1 ? ", …" : "");
  }
  auto dict = gather_state(-1);
  std::map<size_t, at::Tensor> gradients;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& grad = parameters_[i].tensor.mutable_grad();
    if (grad.defined()) gradients[i] = grad.clone();
    grad = at::Tensor();
    trainable_[i] = parameters_[i].tensor.requires_grad();
  }
  reducer_.reset();
  local_.reset();
  buckets_.clear();
  placed_at_.clear();
  std::fill(load_.begin(), load_.end(), 0);
  make_shard_buckets(trainable_subset());
  extend_local_optimizer();
  rebuild_reducer();
  load(dict);
  for (auto& [i, grad] : gradients) {
    if (trainable_[i]) parameters_[i].tensor.mutable_grad() = grad;
  }
  if (reducer_) reducer_->replace_buckets(reducer_->buckets());
}

}  // namespace tessera
