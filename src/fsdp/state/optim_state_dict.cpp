#include <algorithm>
#include <unordered_map>

#include <fmt/format.h>

#include "fsdp/state/state_dict_checks.h"
#include "sharding/shard_state.h"
#include "tessera/error.h"

namespace tessera {

using namespace fsdp;

OptimizerStateDict FullyShardedDataParallelBase::optim_state_dict(
    const torch::optim::Optimizer& optimizer, int to) {
  auto& sharded = *sharded_;
  sharded.require_idle("optim_state_dict");
  check_optimizer(optimizer);
  std::unordered_map<const void*, size_t> index;
  for (const auto* shard : sharded.model.shards())
    index[shard->tensor.unsafeGetTensorImpl()] = shard->parameter;
  OptimizerStateDict dict;
  for (const auto& group : optimizer.param_groups()) {
    auto& entry = dict.groups.emplace_back();
    entry.options = get_options(group.options());
    for (const auto& tensor : group.params()) {
      const auto found = index.find(tensor.unsafeGetTensorImpl());
      if (found == index.end()) {
        throw UsageError(
            fmt::format("{}: optim_state_dict: group {}, parameter {} of the optimizer is not in "
                        "fsdp.parameters(); expected an optimizer made over these",
                        sharded.prefix(), dict.groups.size() - 1, entry.parameters.size()));
      }
      entry.parameters.push_back(sharded.model.parameters[found->second].name);
    }
  }
  auto& group = sharded.model.shard_group;
  const auto& ranks = group.world_ranks();
  const auto place = std::find(ranks.begin(), ranks.end(), to);
  if (to >= 0 && group.size() > 1 && place == ranks.end()) return dict;
  const int root = to < 0 || group.size() == 1 ? -1 : static_cast<int>(place - ranks.begin());
  dict.state = sharding::gather_shard_state(optimizer, sharded.model.shards(),
                                            sharded.model.parameters, group, root);
  return dict;
}

void FullyShardedDataParallelBase::load_optim_state_dict(torch::optim::Optimizer& optimizer,
                                                         const OptimizerStateDict& dict) {
  auto& sharded = *sharded_;
  sharded.require_idle("load_optim_state_dict");
  check_optimizer(optimizer);
  const auto where = sharded.prefix() + ": load_optim_state_dict";
  auto& groups = optimizer.param_groups();
  std::unordered_map<const void*, size_t> index;
  std::map<std::string, size_t> by_name;
  for (const auto* shard : sharded.model.shards()) {
    index[shard->tensor.unsafeGetTensorImpl()] = shard->parameter;
    by_name[sharded.model.parameters[shard->parameter].name] = shard->parameter;
  }
  std::vector<std::vector<std::string>> names;
  for (const auto& group : groups) {
    auto& own = names.emplace_back();
    for (const auto& tensor : group.params()) {
      const auto found = index.find(tensor.unsafeGetTensorImpl());
      own.push_back(found == index.end() ? "a tensor that is not in fsdp.parameters()"
                                         : sharded.model.parameters[found->second].name);
    }
  }
  sharding::check_groups(where, names, dict);
  for (const auto& [name, state] : dict.state) {
    const auto found = by_name.find(name);
    if (found == by_name.end())
      throw UsageError(fmt::format("{}: state of unknown parameter {}", where, name));
    const auto& parameter = sharded.model.parameters[found->second].tensor;
    for (const auto& [key, tensor] : state.tensors) {
      if (is_element_wise(optimizer) && tensor.numel() > 1 &&
          !tensor.sizes().equals(parameter.sizes())) {
        throw UsageError(fmt::format("{}: {} of parameter {} has shape {}; expected {}", where, key,
                                     name, shape_text(tensor.sizes()),
                                     shape_text(parameter.sizes())));
      }
    }
  }
  for (size_t g = 0; g < groups.size(); ++g)
    set_options(groups[g].options(), dict.groups[g].options);
  sharding::load_shard_state(optimizer, sharded.model.shards(), sharded.model.parameters,
                             dict.state);
}

}  // namespace tessera
