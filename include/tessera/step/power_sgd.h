#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <torch/torch.h>

#include "tessera/step/comm_hook.h"

namespace tessera {

struct PowerSgdOptions {
  int64_t rank = 1;  ///< Of the approximation. > 0; at most the smaller side of a matrix is used.
  int64_t start_iteration =
      1000;  ///< Backward passes before it begin with exact means: early gradients matter most.
  double min_compression_rate =
      2;  ///< An n × m gradient is compressed where (n + m) · rank · this < n · m. > 0
  bool warm_start =
      true;  ///< Each approximation begins with the last one; off, with a random matrix.
  bool error_feedback = true;  ///< What the approximation lost is added to the next gradient.
  uint64_t seed = 0;           ///< Of the random matrices; the same on all ranks.
};

/// PowerSGD (Vogels et al., 2019): a gradient of n × m, its first dimension against the others,
/// travels as two thin matrices P (n × rank) and Q (m × rank): one power iteration with
/// orthogonalisation on the mean over the ranks. Vectors, and matrices that would not shrink, are
/// averaged exactly. A value handle: copies share one state.
///
///   tessera::PowerSgd power({.rank = 4, .start_iteration = 100});
///   tessera::DistributedDataParallel ddp(net, world, {.comm_hook = power.hook()});
///
/// For one model on one set of ranks. UsageError for impossible options.
class PowerSgd {
 public:
  explicit PowerSgd(PowerSgdOptions options = {});

  CommHook hook() const;

  /// "iteration", "error.NAME" (what this rank still owes to parameter NAME, in its shape) and
  /// "q.NAME". Copies on the CPU. Each rank saves its own: errors differ between ranks. Local.
  using State = std::map<std::string, at::Tensor>;
  State state_dict() const;
  /// Of the same rank of a world of the same size; for another world drop the entries "error.*".
  /// Local, on all ranks alike. UsageError for an unknown entry; the state is then unchanged.
  void load_state_dict(const State& state);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace tessera
