#pragma once

#pragma GCC visibility push(default)
namespace tessera {

/// The end of a step, for end_step() of a wrapper whose gradients travel in a narrow format
/// (WireOptions::gradients).
struct StepEnd {
  /// True if the optimizer has used the gradients since the last call. False: the next gradients
  /// get the rounding errors of the gradients that were last used.
  bool used = true;
  /// Factor from the loss scale of those gradients to the scale of the next ones. Finite and > 0.
  double scale = 1;
};

}  // namespace tessera
#pragma GCC visibility pop
