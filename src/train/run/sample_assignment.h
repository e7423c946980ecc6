#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera::train {

/// Assigns the samples of a run to ranks, also when the world size does not divide the global
/// batch. In each iteration every rank takes the next ⌈global_batch / world⌉ samples, in rank
/// order, until all steps · global_batch samples are assigned. If the world size divides the global
/// batch, each iteration is a step and the parts are equal. A resumed run assigns the samples that
/// remain, also when its number of samples per iteration differs.
struct SampleAssignment {
  SampleAssignment(int64_t steps, int64_t global_batch, int world_size)
      : world(world_size),
        per_rank((global_batch + world_size - 1) / world_size),
        total(steps * global_batch) {}

  struct Samples {
    int64_t first = 0;
    int64_t count = 0;  ///< 0: the rank has no data in this iteration
  };
  Samples samples(int64_t iteration, int rank) const {
    const int64_t first = assigned_before(iteration) + rank * per_rank;
    return {first, std::clamp<int64_t>(total - first, 0, per_rank)};
  }

  /// Samples of an iteration in which every rank has per_rank samples.
  int64_t per_iteration() const { return per_rank * world; }
  /// Samples that are assigned before `iteration`.
  int64_t assigned_before(int64_t iteration) const {
    return start_sample + (iteration - start_iteration) * per_iteration();
  }
  /// Samples of all ranks before `iteration`: without those that its last one lacks in a join.
  int64_t used_before(int64_t iteration) const {
    return std::min(assigned_before(iteration), std::max(total, start_sample));
  }
  /// Iterations up to the last one in which every rank has per_rank samples.
  int64_t full_iterations() const { return start_iteration + remaining() / per_iteration(); }
  /// Iterations up to the last one in which any rank has samples.
  int64_t all_iterations() const {
    return start_iteration + (remaining() + per_iteration() - 1) / per_iteration();
  }
  int64_t remaining() const { return std::max<int64_t>(total - start_sample, 0); }

  int64_t world;
  int64_t per_rank;
  int64_t total;
  int64_t start_iteration = 0;  ///< iterations done before this process
  int64_t start_sample = 0;     ///< samples assigned in them
};

}  // namespace tessera::train
