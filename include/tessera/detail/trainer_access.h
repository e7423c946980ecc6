#pragma once

#include "tessera/zero_redundancy_optimizer.h"

#pragma GCC visibility push(default)
namespace tessera::zero {

/// Functions for a loop that never reads `.grad` between step() and zero_grad(). All are local;
/// every rank makes the same calls.
struct TrainerAccess {
  /// step() may replace this rank's own gradients by the mean, which then takes no memory of its
  /// own. zero_grad() must follow before the next backward; otherwise the next step is a UsageError
  /// on every rank. No effect where gradients are reduced within backward, or not at all.
  static void use_up_gradients(ZeroRedundancyOptimizer& optimizer);
  /// Has step() compute the 2-norm of the mean gradient while it reads the gradient, or not.
  static void track_norm(ZeroRedundancyOptimizer& optimizer, bool track);
  /// The norm in the last step, over all ranks.
  static double last_norm(const ZeroRedundancyOptimizer& optimizer);
};

}  // namespace tessera::zero
#pragma GCC visibility pop
