#pragma once

#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tessera/optim/optimizer_state.h"

namespace tessera::sharding {

/// What a local optimizer is to have as the state of `shard`, its parameter; none: as never
/// stepped.
struct NewState {
  std::string parameter;
  at::Tensor shard;
  std::optional<ParamState> state;
};

/// Sets all of them, or none: UsageError "<who>: parameter <name>: …". Tensors are taken over.
void replace_states(torch::optim::Optimizer& optimizer, const std::string& who,
                    const std::vector<NewState>& states);

/// `run`, elements in memory order, as a tensor like `shard`. No copy.
at::Tensor shaped_like(const at::Tensor& run, const at::Tensor& shard);

}  // namespace tessera::sharding
