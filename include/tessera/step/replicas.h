#pragma once

#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

#include "tessera/process_group.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Compares tensors that several ranks must hold with equal bits: parameters under
/// DistributedDataParallel, those that ZeroRedundancyOptimizer has gathered, shards that
/// hybrid sharding replicates, buffers. Two ranks are compared in the tensors that both name, so a
/// rank may have names of its own. Reads every tensor once (XXH3, 128 bits) and exchanges 64 bytes
/// a rank; the names are exchanged after a difference alone.
///
/// Throws AgreedError on every rank if a tensor differs: the first one by name, and the ranks in
/// the minority. With `repair`, every differing tensor gets the bits of the majority of its ranks
/// instead, and the result is that text; AgreedError if there is no majority. Returns "" if nothing
/// differs. Collective; blocks.
std::string check_replicas(const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                           ProcessGroup group, bool repair = false);

}  // namespace tessera
#pragma GCC visibility pop
