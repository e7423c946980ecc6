#pragma once

#include <optional>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include "tessera/optim/optimizer_state.h"
#include "tessera/optim/state_slice.h"

namespace tessera::sharding {

/// The new state in a local optimizer for `shard`, its parameter. Without a value: the parameter
/// counts as never stepped.
struct NewState {
  std::string parameter;
  at::Tensor shard;
  std::optional<ParamState> state;
};

/// Sets all of these states, or none: UsageError "<who>: parameter <name>: …". Tensors are not
/// copied.
void replace_states(torch::optim::Optimizer& optimizer, const std::string& who,
                    const std::vector<NewState>& states);

/// load_state_slices() that drops each tensor of `slices` when it has copied it, so that a state
/// that was read from a file is in memory once. kWireResidual, the wrapper's, stays.
void take_state_slices(torch::optim::Optimizer& optimizer,
                       const std::vector<ParameterShard>& shards, std::vector<StateSlice>& slices);

/// `run` (elements in memory order) as a tensor with the shape of `shard`. No copy.
at::Tensor shaped_like(const at::Tensor& run, const at::Tensor& shard);

}  // namespace tessera::sharding
