#pragma once

#include "tessera/local_sgd.h"

namespace tessera::local_sgd {

/// The mean of one tensor (1-D, of equal size on all ranks) over the outer group, in the chosen
/// form. At most one mean is under way.
class OuterMean {
 public:
  OuterMean(ProcessGroup outer, OuterWire wire) : outer_(std::move(outer)), wire_(wire) {}

  /// Starts the mean. `values` is taken over. Collective; does not block.
  void start(const at::Tensor& values);
  /// Waits for the mean and returns it; the same bits on all ranks.
  at::Tensor finish();
  bool under_way() const { return under_way_; }
  /// The mean, as finish(), but it counts as under way still.
  at::Tensor peek();
  /// As after peek(), with `mean`; undefined: none is under way.
  void restore(const at::Tensor& mean);

  /// Rounding errors of int8, added to the next mean; undefined before the first.
  at::Tensor residual;

 private:
  ProcessGroup outer_;
  OuterWire wire_;
  bool under_way_ = false;
  bool complete_ = false;  // values_ has the mean
  Work work_;
  at::Tensor values_, bytes_;
};

}  // namespace tessera::local_sgd
