#pragma once

#include <cmath>
#include <utility>

#include <torch/types.h>

#include "tessera/process_group.h"

namespace tessera::zero {

/// The 2-norm of the mean gradient, accumulated while a step reads the gradient anyway.
struct NormTracker {
  bool tracking = false;
  double squares = 0;            ///< Sum over this rank's segments in the current step.
  at::Tensor squares_on_device;  ///< The same for segments on a device.
  double last = 0;               ///< Norm of the last tracked step, over all ranks.

  /// A step, or another evaluation of its gradient, begins.
  void begin() {
    squares = 0;
    squares_on_device = at::Tensor();
  }
  /// Adds a segment of the mean, if tracking. The host does not wait for a device.
  void add(const at::Tensor& mean) {
    if (!tracking) return;
    const auto values = mean.is_complex() ? at::view_as_real(mean) : mean;
    const auto sum = at::sum(values.to(at::kDouble).square());
    if (mean.is_cpu()) squares += sum.item<double>();
    else squares_on_device = squares_on_device.defined() ? squares_on_device + sum : sum;
  }
  /// The step is over: sums over the ranks. Collective, if tracking.
  void finish(ProcessGroup& group) {
    if (!tracking) return;
    if (squares_on_device.defined()) squares += squares_on_device.item<double>();
    squares_on_device = at::Tensor();
    auto sum = at::full({1}, std::exchange(squares, 0.0), at::kDouble);
    group.all_reduce(sum, 1, "norm of the gradients");
    last = std::sqrt(sum.item<double>());
  }
};

}  // namespace tessera::zero
