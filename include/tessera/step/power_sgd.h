#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <torch/types.h>

#include "tessera/step/comm_hook.h"

#pragma GCC visibility push(default)
namespace tessera {

class OptionReader;

struct PowerSgdOptions {
  /// Rank of the approximation, > 0. At most the smaller side of a matrix is used.
  int64_t rank = 1;
  /// The first `start_iteration` backward passes average exactly, because early gradients matter
  /// most. >= 0
  int64_t start_iteration = 1000;
  /// An n × m gradient is compressed if (n + m) · rank · min_compression_rate < n · m. > 0
  double min_compression_rate = 2;
  /// On: each approximation starts from the previous one. Off: it starts from a random matrix.
  bool warm_start = true;
  /// The error of each approximation is added to the next gradient.
  bool error_feedback = true;
  /// Seed of the random matrices. Must be the same on all ranks.
  uint64_t seed = 0;
  void read(OptionReader& options);
};

/// PowerSGD (Vogels et al., 2019) as a communication hook. A gradient is treated as an n × m matrix
/// (its first dimension against the others) and sent as two thin matrices P (n × rank) and Q
/// (m × rank): one power iteration with orthogonalisation on the mean over the ranks. Vectors, and
/// matrices that would not shrink, are averaged exactly. Copies share one state.
///
///   tessera::PowerSgd power({.rank = 4, .start_iteration = 100});
///   tessera::DistributedDataParallel ddp(net, world, {.comm_hook = power.hook()});
///
/// Use one PowerSgd for one model on one group of ranks. Throws UsageError for options out of
/// range.
class PowerSgd {
 public:
  explicit PowerSgd(PowerSgdOptions options = {});

  /// The hook for DistributedDataParallelOptions::comm_hook.
  CommHook hook() const;

  /// Entries "iteration", "error.NAME" (the error that this rank adds to the next gradient of
  /// parameter NAME, in its shape) and "q.NAME". Copies, on the CPU. Each rank saves its own state,
  /// because the errors differ between ranks. Local.
  using State = std::map<std::string, at::Tensor>;
  State state_dict() const;
  /// Loads a state that the same rank saved in a world of the same size. For a world of another
  /// size, drop the entries "error.*". Local; all ranks must load. Throws UsageError for an unknown
  /// entry or if "iteration" is missing; the state is then unchanged.
  void load_state_dict(const State& state);

 private:
  class [[gnu::visibility("hidden")]] Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace tessera
#pragma GCC visibility pop
