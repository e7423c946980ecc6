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

/// State of a ZeroRedundancyOptimizer whose parameters travel encoded: the rounding errors of the
/// values that the ranks hold. Without it training continues from the rounded values.
constexpr const char* kWireResidual = "wire_residual";

/// Joins the state of the ranks' local optimizers to whole tensors by parameter name, on the CPU of
/// rank `to`, or of every rank if `to` is negative. Returns an empty map on other ranks.
/// Collective.
std::map<std::string, ParamState> gather_shard_state(const torch::optim::Optimizer& local,
                                                     const std::vector<const OwnedShard*>& shards,
                                                     const std::vector<NamedTensor>& parameters,
                                                     ProcessGroup& group, int to);

/// Copies this rank's part of `state` into its local optimizer. Shards without state in it count as
/// never stepped. Local.
void load_shard_state(torch::optim::Optimizer& local, const std::vector<const OwnedShard*>& shards,
                      const std::vector<NamedTensor>& parameters,
                      const std::map<std::string, ParamState>& state);

/// Gives each group of `optimizer` its options in `dict`. If one of them cannot be set, throws and
/// changes none. Local.
void take_group_options(torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict);

/// UsageError "<who>: …" if the groups of `dict` have other parameters than `names`, which are the
/// optimizer's parameters by group, in order. Local.
void check_groups(const std::string& who, const std::vector<std::vector<std::string>>& names,
                  const OptimizerStateDict& dict);

/// `dict` for an optimizer whose groups have the parameters `names`: with these groups, and without
/// the state of other parameters. Groups with no parameter in `dict` have the optimizer's present
/// options. Local.
OptimizerStateDict for_groups(const OptimizerStateDict& dict,
                              const std::vector<std::vector<std::string>>& names,
                              const torch::optim::Optimizer& optimizer);

/// The shards as users see them: without empty ones, in the order of the parameters. Local.
std::vector<ParameterShard> parameter_shards(const std::vector<const OwnedShard*>& owned,
                                             const std::vector<NamedTensor>& parameters);

}  // namespace tessera::sharding
