#include <algorithm>
#include <unordered_map>

#include <fmt/format.h>

#include "fsdp/state/state_dict_checks.h"
#include "sharding/shard_state.h"
#include "tessera/error.h"

namespace tessera {

using namespace fsdp;

namespace {

/// The names of the parameters in the optimizer's groups; "" for one that has no shard.
std::vector<std::vector<std::string>> names_in(const torch::optim::Optimizer& optimizer,
                                               const ShardedModel& model) {
  std::unordered_map<const void*, std::string> names;
  for (const auto* shard : model.shards())
    names[shard->tensor.unsafeGetTensorImpl()] = model.parameters[shard->parameter].name;
  std::vector<std::vector<std::string>> result;
  for (const auto& group : optimizer.param_groups()) {
    auto& own = result.emplace_back();
    for (const auto& tensor : group.params()) own.push_back(names[tensor.unsafeGetTensorImpl()]);
  }
  return result;
}

}  // namespace

OptimizerStateDict FullyShardedDataParallelBase::optim_state_dict(
    const torch::optim::Optimizer& optimizer, int to) {
  auto& sharded = *sharded_;
  sharded.require_idle("optim_state_dict");
  check_destination(sharded, "optim_state_dict", to);
  check_optimizer(optimizer);
  OptimizerStateDict dict;
  auto names = names_in(optimizer, sharded.model);
  for (size_t g = 0; g < names.size(); ++g) {
    const auto unknown = std::find(names[g].begin(), names[g].end(), "");
    if (unknown != names[g].end()) {
      throw UsageError(
          fmt::format("{}: optim_state_dict: group {}, parameter {} of the optimizer is not in "
                      "fsdp.parameters(); expected an optimizer made over these",
                      sharded.prefix(), g, unknown - names[g].begin()));
    }
    auto& entry = dict.groups.emplace_back();
    entry.options = get_options(optimizer.param_groups()[g].options());
    entry.parameters = std::move(names[g]);
  }
  auto& group = sharded.model.shard_group;
  const auto& ranks = group.world_ranks();
  const auto place = std::find(ranks.begin(), ranks.end(), to);
  const bool alone = group.size() == 1;
  if (to >= 0 && (alone ? sharded.model.world.rank() != to : place == ranks.end())) return dict;
  const int root = to < 0 || alone ? -1 : static_cast<int>(place - ranks.begin());
  dict.state = sharding::gather_shard_state(optimizer, sharded.model.shards(),
                                            sharded.model.parameters, group, root);
  return dict;
}

void FullyShardedDataParallelBase::load_optim_state_dict(torch::optim::Optimizer& optimizer,
                                                         const OptimizerStateDict& given,
                                                         bool strict) {
  auto& sharded = *sharded_;
  sharded.require_idle("load_optim_state_dict");
  check_optimizer(optimizer);
  const auto where = sharded.prefix() + ": load_optim_state_dict";
  auto names = names_in(optimizer, sharded.model);
  for (auto& group : names)
    std::replace(group.begin(), group.end(), std::string(),
                 std::string("a tensor that is not in fsdp.parameters()"));
  const auto dict = strict ? given : sharding::for_groups(given, names, optimizer);
  sharding::check_groups(where, names, dict);
  for (const auto& [name, state] : dict.state) {
    const auto& known = sharded.model.parameters;
    const auto found = std::find_if(known.begin(), known.end(),
                                    [&name = name](const auto& each) { return each.name == name; });
    if (found == known.end())
      throw UsageError(fmt::format("{}: state of unknown parameter {}", where, name));
    for (const auto& [key, tensor] : state.tensors) {
      if (is_element_wise(optimizer) && tensor.numel() > 1 &&
          !tensor.sizes().equals(found->tensor.sizes())) {
        throw UsageError(fmt::format("{}: {} of parameter {} has shape {}; expected {}", where, key,
                                     name, c10::str(tensor.sizes()),
                                     c10::str(found->tensor.sizes())));
      }
    }
  }
  sharding::take_group_options(optimizer, dict);
  sharding::load_shard_state(optimizer, sharded.model.shards(), sharded.model.parameters,
                             dict.state);
}

}  // namespace tessera
