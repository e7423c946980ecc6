#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace tessera::train {

/// Which sequences of a run fall to which rank, when the world need not divide the global batch: a
/// rank takes ⌈global_batch / world⌉ at a time, in order, until the run's steps · global_batch are
/// dealt. Where the world divides, that is steps times an equal part for each. A run that goes on
/// deals what is left of them, whatever a round was before.
struct SampleAssignment {
  SampleAssignment(int64_t steps, int64_t global_batch, int world_size)
      : world(world_size),
        per_rank((global_batch + world_size - 1) / world_size),
        total(steps * global_batch) {}

  struct Part {
    int64_t first = 0;
    int64_t count = 0;  ///< 0: out of data
  };
  Part part(int64_t iteration, int rank) const {
    const int64_t first = dealt(iteration) + rank * per_rank;
    return {first, std::clamp<int64_t>(total - first, 0, per_rank)};
  }

  /// Samples of an iteration in which all ranks have a full part.
  int64_t round() const { return per_rank * world; }
  /// Samples that are dealt before `iteration`.
  int64_t dealt(int64_t iteration) const { return start_sample + (iteration - start) * round(); }
  /// Iterations in which all ranks have a full part.
  int64_t full() const { return start + left() / round(); }
  /// Iterations in which some rank has one.
  int64_t some() const { return start + (left() + round() - 1) / round(); }
  int64_t left() const { return std::max<int64_t>(total - start_sample, 0); }

  int64_t world;
  int64_t per_rank;
  int64_t total;
  int64_t start = 0;         // iterations done by earlier processes,
  int64_t start_sample = 0;  // and the samples that they took
};

}  // namespace tessera::train
