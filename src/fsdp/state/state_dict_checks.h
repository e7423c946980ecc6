#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/sharded_module.h"

namespace tessera::fsdp {

/// The entries of the module's state beside the sharded parameters, by name: parameters that
/// ignored_states names, then the defined buffers.
std::vector<std::pair<std::string, at::Tensor>> unsharded(const ShardedModule& sharded);

/// The same as values to save, whatever the mode of the last forward: in the dtypes at
/// construction, and without conj and neg bits.
std::vector<std::pair<std::string, at::Tensor>> unsharded_values(const ShardedModule& sharded);

/// Parameter `index`, whole, in its shape, on the CPU of world rank `to` (on all ranks if to <
/// 0); undefined on the others. Collective.
at::Tensor whole(const ShardedModel& model, size_t index, int to);
/// Copies this rank's shard from a tensor of the parameter's shape. Local.
void take_shard(const ShardedModel& model, size_t index, const at::Tensor& whole);

/// UsageError unless `to` is a rank, or negative for all ranks. Local.
void check_destination(const ShardedModule& sharded, const char* call, int to);

/// UsageError on all ranks where they have other values, or other names. Collective.
void check_same_values(const ShardedModule& sharded, const char* call,
                       const std::vector<std::pair<std::string, at::Tensor>>& values);

/// Runs `check` on every rank under tessera::agree(): an error on one rank is thrown on all.
/// Messages begin with the wrapper's name and `call`. Collective.
void check_on_all_ranks(const ShardedModule& sharded, const char* call,
                        const std::function<void()>& check);

}  // namespace tessera::fsdp
