#pragma once

#include <cstdint>
#include <vector>

#include <torch/types.h>

#include "tessera/process_group.h"

#pragma GCC visibility push(default)
namespace tessera {

class OptionReader;

struct GradScalerOptions {
  bool enabled = true;  ///< Off: the scale is 1, no gradient is checked and nothing is sent.
  /// Off: the scale stays init_scale. Infinities are still found.
  bool dynamic = true;
  double init_scale = 65536;    ///< > 0
  double growth_factor = 2;     ///< > 1
  double backoff_factor = 0.5;  ///< In (0, 1).
  /// Consecutive steps without an infinity or NaN after which the scale grows. >= 1
  int64_t growth_interval = 2000;
  void read(OptionReader& options);  ///< The numbers; not `enabled` and `dynamic`.
};

/// Dynamic loss scaling (Micikevicius et al., 2018; PyTorch's GradScaler). The loss is multiplied
/// by a scale, so that small gradients do not vanish in half precision, and the gradients are
/// divided by it before they are used. If gradients overflow, all ranks skip the step and multiply
/// the scale by backoff_factor. After growth_interval steps without an overflow they multiply it by
/// growth_factor.
///
///   scaler.scale(loss).backward();
///   const bool skip = scaler.found_inf(gradients, world);
///   if (!skip) { multiply the gradients by scaler.inverse(); clip; optimizer.step(); }
///   scaler.update(skip);
///
/// With a wrapper's option wire.gradients, the wrapper must know of skipped steps and of a new
/// scale: see "Fewer bytes" in docs/hosts.md.
///
/// All ranks must use the same options and make the same calls, and then have the same scale. All
/// calls are local except found_inf(). Throws UsageError for options out of range.
class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  /// `loss` times the scale. A half-precision loss is converted to float32 first: 65536 is not a
  /// finite float16.
  at::Tensor scale(const at::Tensor& loss) const;
  double scale() const { return options_.enabled ? state_.scale : 1; }
  double inverse() const { return 1 / scale(); }

  /// True if any gradient on any rank has an infinity or a NaN. All ranks get the same result.
  /// `gradients` are this rank's own; undefined and empty ones are ignored. Collective: one
  /// all-reduce of one number (none when disabled).
  bool found_inf(const std::vector<at::Tensor>& gradients, ProcessGroup& group) const;

  /// Adapts the scale. Call it after each step, skipped or not. The scale is always a normal
  /// float32 number.
  void update(bool found_inf);

  /// The state that a checkpoint saves.
  struct State {
    double scale = 65536;
    int64_t growth_tracker = 0;  ///< Steps without an infinity since the scale changed.
  };
  const State& state() const { return state_; }
  /// Throws UsageError if the scale is not a positive number or the count is negative.
  void load_state(const State& state);

 private:
  GradScalerOptions options_;
  State state_;
};

}  // namespace tessera
#pragma GCC visibility pop
