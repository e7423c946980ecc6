#pragma once

#include <cmath>
#include <utility>

#include <torch/torch.h>

#include "tessera/process_group.h"

namespace tessera::zero {

/// The 2-norm of the mean gradient, accumulated while a step reads the gradient anyway.
struct NormTracker {
  bool tracking = false;
  double squares = 0;  ///< Sum over this rank's segments in the current step.
  double last = 0;     ///< Norm of the last tracked step, over all ranks.

  /// Adds a segment of the mean, if tracking.
  void add(const at::Tensor& mean) {
    if (tracking) squares += at::sum(mean.to(at::kDouble).square()).item<double>();
  }
  /// The step is over: sums over the ranks. Collective, if tracking.
  void finish(ProcessGroup& group) {
    if (!tracking) return;
    auto sum = at::full({1}, std::exchange(squares, 0.0),
                        at::TensorOptions().dtype(at::kDouble).device(group.control_device()));
    group.all_reduce(sum, 1, "norm of the gradients");
    last = std::sqrt(sum.item<double>());
  }
};

}  // namespace tessera::zero
