#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "sharding/shard_state.h"
#include "tessera/error.h"
#include "zero/impl.h"

namespace tessera {

std::vector<OptimizerStateDict::Group> ZeroRedundancyOptimizer::Impl::groups() const {
  std::vector<OptimizerStateDict::Group> result;
  for (const auto& group : outer_.param_groups())
    result.push_back({{}, get_options(group.options())});
  for (size_t i = 0; i < parameters_.size(); ++i)
    result[group_of_[i]].parameters.push_back(parameters_[i].name);
  return result;
}

OptimizerStateDict ZeroRedundancyOptimizer::Impl::gather_state(int to) {
  at::NoGradGuard no_grad;
  OptimizerStateDict dict;
  dict.groups = groups();
  const bool keep = to < 0 || to == group_.rank();
  dict.state = sharding::gather_shard_state(*local_, owned_shards(), parameters_, group_, to);
  if (keep) {
    for (const auto& [name, state] : parked_) dict.state.emplace(name, state);
  }
  return dict;
}

void ZeroRedundancyOptimizer::Impl::load(const OptimizerStateDict& dict) {
  at::NoGradGuard no_grad;
  const auto who = fmt::format("{}.load_state_dict: rank {}", kName, group_.rank());
  const auto fail = [&](const std::string& problem) { throw UsageError(who + ": " + problem); };
  std::map<std::string, size_t> index;
  std::vector<std::vector<std::string>> names(outer_.param_groups().size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    index[parameters_[i].name] = i;
    names[group_of_[i]].push_back(parameters_[i].name);
  }
  sharding::check_groups(who, names, dict);
  for (const auto& [name, state] : dict.state) {
    const auto found = index.find(name);
    if (found == index.end()) fail(fmt::format("state of unknown parameter {}", name));
    for (const auto& [key, tensor] : state.tensors) {
      const auto& parameter = parameters_[found->second].tensor;
      if (element_wise_ && !tensor.sizes().equals(parameter.sizes()) && tensor.numel() > 1) {
        fail(fmt::format("{} of parameter {} has {} elements; expected {}", key, name,
                         tensor.numel(), parameter.numel()));
      }
    }
  }
  for (size_t g = 0; g < names.size(); ++g)
    set_options(outer_.param_groups()[g].options(), dict.groups[g].options);
  copy_options(true);
  parked_.clear();
  for (const auto& [name, state] : dict.state) {
    if (!trainable_[index[name]]) parked_.emplace(name, state);
  }
  sharding::load_shard_state(*local_, owned_shards(), parameters_, dict.state);
}

std::vector<const sharding::OwnedShard*> ZeroRedundancyOptimizer::Impl::owned_shards() const {
  std::vector<const sharding::OwnedShard*> shards;
  for (const auto& bucket : buckets_) {
    for (const auto& shard : bucket.shards) shards.push_back(&shard);
  }
  return shards;
}

ZeroRedundancyOptimizer::Memory ZeroRedundancyOptimizer::Impl::memory() const {
  Memory memory;
  for (const auto& parameter : parameters_)
    memory.parameters +=
        parameter.tensor.numel() * static_cast<int64_t>(parameter.tensor.element_size());
  for (const auto& bucket : buckets_) {
    if (options_.reduce_gradients) memory.gradients += bucket.gradients.bytes();
    if (bucket.reduced.defined()) memory.gradients += static_cast<int64_t>(bucket.reduced.nbytes());
    for (const auto& shard : bucket.shards) {
      const auto state = get_state(*local_, shard.tensor);
      if (!state) continue;
      for (const auto& [name, tensor] : state->tensors)
        memory.optimizer_state += static_cast<int64_t>(tensor.nbytes());
    }
  }
  return memory;
}

}  // namespace tessera
