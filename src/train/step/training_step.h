#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/detail/torch_compat.h"
#include "tessera/step/grad_scaler.h"
#include "tessera/step/lr_scheduler.h"
#include "tessera/train/optim_wrapper.h"
#include "train/report/records.h"
#include "train/step/fault_policy.h"

namespace tessera::train {

/// Autocast in the dtype, if there is one, while alive.
class Autocast {
 public:
  explicit Autocast(std::optional<at::ScalarType> dtype);
  ~Autocast();
  Autocast(const Autocast&) = delete;

 private:
  std::optional<compat::AutocastState::Scope> scope_;
};

/// The input of one rank to a step.
struct StepInput {
  std::vector<Batch> parts;  ///< its micro-batches; empty: it has no data
  double weight = 1;         ///< of its loss in the mean over the ranks with data
  int ranks_with_data = 0;   ///< 0: all
  bool left_out = false;     ///< nothing is trained, on any rank
  /// Called after the last backward: numbers that are summed over the ranks. Empty: none.
  std::function<std::vector<double>()> flags = {};

  /// For each micro-batch, its samples divided by those of this rank: its part of the mean.
  double divisor_of(int64_t part) const;
};

struct StepResult {
  StepRecord record;          ///< loss, grad_norm, lr, loss_scale; figures unless in a join
  double own_loss = 0;        ///< of this rank
  double norm = 0;            ///< of the mean gradient, before clipping; NaN if there was none
  bool updated = false;       ///< whether the parameters have changed; with several models, whether
                              ///< no update was left out
  std::vector<bool> updates;  ///< of each model, whether its parameters have changed
  std::string model = "";     ///< of several, the first one that missed an update
  std::vector<double> sums;   ///< of `flags`

  /// Reads the figures of this rank's batch or micro-batch, which has this share of its samples.
  void add_figures(const std::vector<std::pair<std::string, at::Tensor>>& values, double share);
  /// Makes the figures and the loss means over the ranks with data. Collective.
  void average(ProcessGroup group, const StepInput& input, bool figures_of_all);
};

/// The work of a run in one step. Collective.
class RunStep {
 public:
  virtual ~RunStep() = default;
  /// `figures_of_all`: every rank has data, so all know the names of the figures.
  virtual StepResult run(const Progress& progress, const StepInput& input,
                         const FaultPolicy& policy, bool figures_of_all) = 0;
};

/// One step of training of one model, from learning rates to update. Collective in model.group(),
/// unless "Local.".
class TrainingStep : public RunStep {
 public:
  /// UsageError for impossible options. Without a schedule the rates stay. Local.
  TrainingStep(ModelWrapper& model, OptimWrapperOptions options, LrSchedule schedule = {});

  StepResult run(const Progress& progress, const StepInput& input, const FaultPolicy& policy,
                 bool figures_of_all) override;
  /// Part of a step: sets the scheduled learning rate of every parameter group, computed from the
  /// group's base rate. Returns the first group's. Local.
  double set_learning_rates(const Progress& progress);
  /// Part of a step: backward of loss / divisor; `loss` is undefined on a rank without data.
  void backward(const at::Tensor& loss, double divisor) {
    backward(loss, divisor, scaler_.scale());
  }
  void backward(const at::Tensor& loss, double divisor, double scale);
  struct Update {
    double norm = 0;
    bool updated = false;
  };
  /// The last part: unscales, clips, updates.
  Update update();
  /// The same without end_step(), of gradients with a loss scale that others may use too.
  Update update(double scale);
  GradScaler& scaler() { return scaler_; }
  const GradScaler& scaler() const { return scaler_; }
  const OptimWrapperOptions& options() const { return options_; }

 private:
  ModelWrapper& model_;
  OptimWrapperOptions options_;
  LrSchedule schedule_;
  std::vector<double> base_lrs_;  // of the parameter groups
  GradScaler scaler_;
  bool unfinished_ = false;  // a step that has thrown may have left gradients
};

}  // namespace tessera::train
