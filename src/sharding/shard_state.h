#pragma once

#include <map>
#include <string>
#include <vector>

#include "sharding/named_tensor.h"
#include "sharding/owned_shard.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/optim/state_slice.h"
#include "tessera/process_group.h"

namespace tessera::sharding {

/// The state that the ranks' local optimizers have for their shards of `parameters`, whole and by
/// name, on the CPU of rank `to`, of all for to < 0; empty elsewhere. Collective.
std::map<std::string, ParamState> gather_shard_state(const torch::optim::Optimizer& local,
                                                     const std::vector<const OwnedShard*>& shards,
                                                     const std::vector<NamedTensor>& parameters,
                                                     ProcessGroup& group, int to);

/// This rank's part of `state` into its local optimizer, copied; shards that have none there are as
/// never stepped. Local.
void load_shard_state(torch::optim::Optimizer& local, const std::vector<const OwnedShard*>& shards,
                      const std::vector<NamedTensor>& parameters,
                      const std::map<std::string, ParamState>& state);

/// `names`: the optimizer's parameters by group, in order. UsageError "<who>: …" where the groups
/// of `dict` have others. Local.
void check_groups(const std::string& who, const std::vector<std::vector<std::string>>& names,
                  const OptimizerStateDict& dict);

/// What users see of them: those that are not empty, in the order of the parameters. Local.
std::vector<ParameterShard> parameter_shards(const std::vector<const OwnedShard*>& owned,
                                             const std::vector<NamedTensor>& parameters);

}  // namespace tessera::sharding
