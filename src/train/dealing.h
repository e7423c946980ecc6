#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace tessera::train {

/// Which sequences of a run fall to which rank, when the world need not divide the global batch: a rank takes
/// ⌈global_batch / world⌉ at a time, in order, until the run's steps · global_batch are dealt. Where the world divides,
/// that is steps times an equal part for each.
struct Dealing {
  Dealing(int64_t steps, int64_t global_batch, int world_size)
      : world(world_size), per_rank((global_batch + world_size - 1) / world_size), total(steps * global_batch) {}

  struct Part {
    int64_t first = 0;
    int64_t count = 0;  ///< 0: out of data
  };
  Part part(int64_t iteration, int rank) const {
    const int64_t first = (iteration * world + rank) * per_rank;
    return {first, std::clamp<int64_t>(total - first, 0, per_rank)};
  }

  /// Samples of an iteration in which all ranks have a full part.
  int64_t round() const { return per_rank * world; }
  /// Iterations in which all ranks have a full part.
  int64_t full() const { return total / (per_rank * world); }
  /// Iterations in which some rank has one.
  int64_t some() const { return (total + per_rank * world - 1) / (per_rank * world); }

  int64_t world;
  int64_t per_rank;
  int64_t total;
};

}  // namespace tessera::train
