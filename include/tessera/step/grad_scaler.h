#pragma once

#include <cstdint>
#include <vector>

#include <torch/torch.h>

#include "tessera/process_group.h"

namespace tessera {

class OptionReader;

struct GradScalerOptions {
  bool enabled = true;  ///< Off: the scale is 1, nothing is looked at or sent.
  bool dynamic =
      true;  ///< Off: the scale stays init_scale; steps with an infinity are still found.
  double init_scale = 65536;    ///< > 0
  double growth_factor = 2;     ///< > 1
  double backoff_factor = 0.5;  ///< In (0, 1).
  int64_t growth_interval =
      2000;  ///< >= 1: steps in a row without an infinity before the scale grows.
  void read(OptionReader& options);  ///< The numbers; not `enabled` and `dynamic`.
};

/// Dynamic loss scaling (Micikevicius et al., 2018; PyTorch's GradScaler): gradients of half types
/// are computed of a loss that is multiplied by a scale, so that small ones do not vanish, and
/// divided by it before they are used. A scale that makes them overflow is halved and that step is
/// skipped, on all ranks; one that did not for long is doubled.
///
///   scaler.scale(loss).backward();
///   const bool skip = scaler.found_inf(gradients, world);
///   if (!skip) { multiply the gradients by scaler.inverse(); clip; optimizer.step(); }
///   scaler.update(skip);
///
/// All ranks have the same options and calls, and so the same scale. Local but for found_inf.
/// UsageError for impossible options.
class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  /// `loss` times the scale; half types become float first, in which 65536 is a number.
  at::Tensor scale(const at::Tensor& loss) const;
  double scale() const { return options_.enabled ? state_.scale : 1; }
  double inverse() const { return 1 / scale(); }

  /// Whether any gradient on any rank has an infinity or a NaN: the same answer on all ranks.
  /// `gradients`: this rank's own, dense; undefined and empty ones do not count. Collective: one
  /// all-reduce of one number (none when disabled).
  bool found_inf(const std::vector<at::Tensor>& gradients, ProcessGroup& group) const;

  /// After each step, skipped or not: adapts the scale. It stays a normal float, whatever happens.
  void update(bool found_inf);

  /// For checkpoints. Loading: UsageError for a scale that is no positive number or a negative
  /// count.
  struct State {
    double scale = 65536;
    int64_t growth_tracker = 0;  ///< Steps without an infinity since the scale changed.
  };
  const State& state() const { return state_; }
  void load_state(const State& state);

 private:
  GradScalerOptions options_;
  State state_;
};

}  // namespace tessera
