#pragma once

#pragma GCC visibility push(default)
namespace tessera {

/// The rule by which the buffers of a module (running statistics of batch norms and others) become
/// the same on all ranks. Every wrapper applies the rule at the end of each synchronising backward
/// (DistributedDataParallel, FullyShardedDataParallel) or in step() (ZeroRedundancyOptimizer,
/// DistributedOptimizer). Evaluation, state dicts and checkpoints then see the same values on every
/// rank. DistributedDataParallel also applies it before each forward pass in training mode. At
/// construction all ranks get rank 0's buffers, whatever the rule.
enum class BufferSync {
  broadcast,  ///< All ranks get rank 0's values; in a join, those of the first rank with data.
  mean,       ///< Floating-point buffers are averaged over the ranks, all others are broadcast.
  none,       ///< Every rank keeps its own buffers.
};

/// Returns "broadcast", "mean" or "none".
const char* buffer_sync_name(BufferSync rule);

}  // namespace tessera
#pragma GCC visibility pop
