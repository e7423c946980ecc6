#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/checkpoint_store.h"
#include "tessera/data/sample_buffer.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/module_state_dict.h"
#include "tessera/zero_redundancy_optimizer.h"

// Checkpoints of your own training loop, in one call each. docs/own_loop.md has a program.

#pragma GCC visibility push(default)
namespace tessera {

/// The parts of such a loop. The objects must live longer. Local.
class LoopParts {
 public:
  /// Every rank has all of the model and of the optimizer's state: a plain module, one under
  /// DistributedDataParallel, or one with the optimizer of a DistributedOptimizer.
  LoopParts(torch::nn::Module& net, torch::optim::Optimizer& optimizer,
            SampleBuffer* buffer = nullptr, bool rng = true);
  LoopParts(torch::nn::Module& net, ZeroRedundancyOptimizer& optimizer,
            SampleBuffer* buffer = nullptr, bool rng = true);
  /// `optimizer`: over fsdp.parameters().
  LoopParts(FullyShardedDataParallelBase& fsdp, torch::optim::Optimizer& optimizer,
            SampleBuffer* buffer = nullptr, bool rng = true);

 private:
  friend std::string save(const CheckpointStore& store, int64_t step, const LoopParts& parts);
  friend int64_t load(const CheckpointStore& store, const LoopParts& parts);

  std::function<ModuleStateDict()> weights_;  // whole on rank 0
  std::function<void(const ModuleStateDict&)> load_weights_;
  std::function<std::vector<ParameterShard>()> shards_;
  std::function<std::vector<StateSlice>(int rank)> slices_;  // that this rank saves
  std::function<void(std::vector<StateSlice>)> load_slices_;
  SampleBuffer* buffer_;  // null: none
  bool rng_;              // whether the random numbers of the CPU are saved
};

/// Writes the checkpoint of `step` and returns its path: weights, state of the optimizer, and for
/// each rank the samples of its buffer and its random numbers. Values that the step determines
/// (learning rates, the order of a Sampler) need not be saved. Errors as
/// CheckpointWriter::commit(). Collective.
std::string save(const CheckpointStore& store, int64_t step, const LoopParts& parts);

/// Continues from the newest sound checkpoint of the store's folder, or from the newest one if none
/// is sound, written by any number of ranks and under any wrapper. Rank 0 logs a warning if the
/// newest one has elements that are not finite. Returns the step; 0 if there is no checkpoint, and
/// then nothing changes. All digests are compared first. With another number of ranks than at the
/// save, rank r gets the samples of ranks r, r + W, …, and keeps its own random numbers. UsageError
/// on all ranks if the checkpoint has no samples and there is a buffer. Collective.
int64_t load(const CheckpointStore& store, const LoopParts& parts);

}  // namespace tessera
#pragma GCC visibility pop
