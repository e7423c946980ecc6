#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <torch/types.h>

#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/step/grad_scaler.h"
#include "tessera/train/model_wrapper.h"

#pragma GCC visibility push(default)
namespace tessera {
namespace train {
class [[gnu::visibility("hidden")]] TrainingStep;
}

struct OptimWrapperOptions {
  int64_t accumulative_counts = 1;            ///< backward passes per update
  std::optional<double> clip_grad_norm = {};  ///< largest norm of the global mean gradient
  /// Largest absolute value of an element of that gradient; applied after clip_grad_norm.
  std::optional<double> clip_grad_value = {};
  double clip_norm_type = 2;  ///< p of that norm and of grad_norm(): any number > 0, or infinity
  NonfiniteNorm nonfinite = NonfiniteNorm::update;  ///< with `scaler` always skip
  std::optional<at::ScalarType> autocast = {};      ///< bfloat16 (CPU, GPU) or float16 (GPU)
  GradScalerOptions scaler{.enabled = false};
};

/// Gradient accumulation, loss scaling, autocast, clipping and the update; mmengine's OptimWrapper
/// and AmpOptimWrapper in one. In each iteration the loss is divided by accumulative_counts (in the
/// tail of a run by the number of iterations that remain), scaled and differentiated. The last
/// iteration of each count then unscales and clips the gradients, steps and removes the gradients.
/// The other iterations communicate nothing: the wrapper's no_sync spans their forward and
/// backward. An infinity on one rank skips the update on all ranks. All ranks make the same calls;
/// update_params() is collective.
class OptimWrapper {
 public:
  explicit OptimWrapper(ModelWrapper& model, OptimWrapperOptions options = {});
  ~OptimWrapper();

  /// Sets the number of iterations that are done and their total (0: unknown, so no tail).
  void initialize_count_status(int64_t done, int64_t all);

  /// One iteration from forward to update. Autocast is on until end_forward(); in iterations that
  /// communicate nothing, no_sync is on until the scope is destroyed.
  class Scope {
   public:
    ~Scope();
    Scope(const Scope&) = delete;
    void end_forward();

   private:
    friend class OptimWrapper;
    explicit Scope(OptimWrapper& wrapper);
    struct [[gnu::visibility("hidden")]] State;
    std::unique_ptr<State> state_;
  };
  [[nodiscard]] Scope optim_context() { return Scope(*this); }

  /// Backward from `loss`, and the update when the iteration ends in one. `loss` is undefined on a
  /// rank without data, which then only makes the other ranks' collectives. Call it within the
  /// iteration's optim_context(). Collective.
  void update_params(const at::Tensor& loss);

  /// Factor of this rank's loss from now on, 1 at first. For ranks with unequal numbers of samples:
  /// with the factor (samples of this rank) / (mean samples of a rank), the mean over the ranks is
  /// the mean over all samples.
  void set_loss_weight(double weight) { weight_ = weight; }

  bool should_update() const;  ///< whether the current iteration ends in an update
  bool should_sync() const { return should_update(); }
  /// True if the last update_params() changed the parameters.
  bool updated() const { return updated_; }
  /// True if the last update_params() left the update out, because it found an infinity.
  bool skipped() const { return skipped_; }
  double grad_norm() const { return norm_; }  ///< norm at the last update, before clipping
  double scale_factor() const;                ///< divisor of the current iteration's loss
  GradScaler& scaler();
  /// ModelWrapper::optimizer_state_dict(): gathered on rank 0, empty on other ranks. Collective.
  OptimizerStateDict state_dict();
  void load_state_dict(const OptimizerStateDict& dict);
  const OptimWrapperOptions& options() const;
  ModelWrapper& model() { return model_; }

 private:
  ModelWrapper& model_;
  std::unique_ptr<train::TrainingStep> step_;
  int64_t done_ = 0, all_ = 0;
  bool updated_ = false, skipped_ = false;
  double norm_ = 0, weight_ = 1;
};

}  // namespace tessera
#pragma GCC visibility pop
