#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <torch/torch.h>

#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/step/grad_scaler.h"

namespace tessera {

class ModelWrapper;

struct OptimWrapperOptions {
  int64_t accumulative_counts = 1;            ///< backward passes an update
  std::optional<double> clip_grad_norm = {};  ///< largest 2-norm of the global mean gradient
  std::optional<double> clip_grad_value =
      {};  ///< largest absolute value of an element of it; after the norm
  std::optional<at::ScalarType> autocast = {};  ///< bfloat16 (CPU, GPU) or float16 (GPU)
  GradScalerOptions scaler{.enabled = false};
};

/// When and how gradients become an update; mmengine's OptimWrapper and AmpOptimWrapper in one. For
/// each iteration: the loss is divided by the accumulation count (in the tail of a run by what is
/// left of it), scaled, differentiated; the last iteration of each count then unscales, clips,
/// steps and lets go of the gradients. On the others nothing is sent: the wrapper's no_sync spans
/// forward and backward. An infinity on one rank skips the update on all. All ranks call everything
/// alike; update_params is collective.
class OptimWrapper {
 public:
  explicit OptimWrapper(ModelWrapper& model, OptimWrapperOptions options = {});
  ~OptimWrapper();

  /// How far the run is, for the tail: iterations done and in all (0: unknown, no tail).
  void initialize_count_status(int64_t done, int64_t all);

  /// One iteration, forward to update: autocast is on until end_forward(), no_sync, where nothing
  /// is to be sent, until it is destroyed.
  class Scope {
   public:
    ~Scope();
    Scope(const Scope&) = delete;
    void end_forward();

   private:
    friend class OptimWrapper;
    explicit Scope(OptimWrapper& wrapper);
    struct State;
    std::unique_ptr<State> state_;
  };
  [[nodiscard]] Scope optim_context() { return Scope(*this); }

  /// Backward from `loss` (undefined on a rank out of data: its part of the others' collectives),
  /// and the update when it is time. Within the iteration's optim_context().
  void update_params(const at::Tensor& loss);

  bool should_update() const;  ///< whether the running iteration ends in an update
  bool should_sync() const { return should_update(); }
  bool updated() const {
    return updated_;
  }  ///< whether the last update_params changed the parameters
  bool skipped() const { return skipped_; }   ///< whether it found an infinity
  double grad_norm() const { return norm_; }  ///< of the last update, before clipping
  double scale_factor() const;                ///< what the running iteration's loss is divided by
  GradScaler& scaler() { return scaler_; }
  /// As ModelWrapper's: consolidates by itself, empty on ranks other than 0. A collective.
  OptimizerStateDict state_dict();
  void load_state_dict(const OptimizerStateDict& dict);
  const OptimWrapperOptions& options() const { return options_; }
  ModelWrapper& model() { return model_; }

 private:
  ModelWrapper& model_;
  OptimWrapperOptions options_;
  GradScaler scaler_;
  int64_t done_ = 0, all_ = 0;
  bool updated_ = false, skipped_ = false;
  double norm_ = 0;
};

}  // namespace tessera
