#include "zero/local_optimizer.h"

#include <algorithm>

#include "sharding/bucket.h"

namespace tessera::zero {

void LocalOptimizer::extend(const torch::optim::Optimizer& visible, const Shards& shards) {
  const auto& groups = visible.param_groups();
  std::vector<std::vector<at::Tensor>> owned(groups.size());
  for (const auto* shard : shards.owned())
    owned[shards.group_of(shard->parameter)].push_back(shard->tensor);
  const size_t existing = optimizer_ ? optimizer_->param_groups().size() : 0;
  for (size_t g = 0; g < existing; ++g) {
    auto& known = optimizer_->param_groups()[g].params();  // new shards come last
    known.insert(known.end(), owned[g].begin() + static_cast<int64_t>(known.size()),
                 owned[g].end());
  }
  std::vector<torch::optim::OptimizerParamGroup> added;
  for (size_t g = existing; g < groups.size(); ++g)
    added.emplace_back(owned[g], groups[g].options().clone());
  if (optimizer_) {
    for (const auto& group : added) tessera::add_param_group(*optimizer_, group);
    return;
  }
  optimizer_ = factory_(std::move(added));
  element_wise_ = is_element_wise(*optimizer_);
}

FusedOptimizer* LocalOptimizer::one_pass(const ShardBucket& bucket) const {
  auto* const fused = dynamic_cast<FusedOptimizer*>(optimizer_.get());
  const bool all = std::all_of(bucket.shards.begin(), bucket.shards.end(), [](const auto& shard) {
    return FusedOptimizer::supports_range(shard.tensor);
  });
  return all ? fused : nullptr;
}

void LocalOptimizer::take_options_of(const torch::optim::Optimizer& visible) {
  for (size_t g = 0; g < optimizer_->param_groups().size(); ++g)
    copy_options(visible.param_groups()[g], optimizer_->param_groups()[g]);
}

void LocalOptimizer::give_options_to(torch::optim::Optimizer& visible) const {
  for (size_t g = 0; g < optimizer_->param_groups().size(); ++g)
    copy_options(optimizer_->param_groups()[g], visible.param_groups()[g]);
}

void LocalOptimizer::set_gradients(ShardBucket& bucket, const at::Tensor& mean,
                                   const std::function<bool(size_t)>& is_used) {
  for (auto& shard : bucket.shards) {
    if (!is_used(shard.parameter)) continue;
    // A whole parameter keeps its shape, for optimizers that look at shapes.
    shard.tensor.mutable_grad() = shard.tensor.dim() == 1
                                      ? sharding::window(mean, shard.at, shard.numel)
                                      : sharding::window(mean, shard.at, shard.tensor);
  }
}

void LocalOptimizer::clear_gradients(ShardBucket& bucket) {
  for (auto& shard : bucket.shards) shard.tensor.mutable_grad() = at::Tensor();
}

}  // namespace tessera::zero
