#include "train/step/models_step.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera::train {

class ModelsStep final : public RunStep {
 public:
  ModelsStep(const TrainStep& plan, StepModels& models, ModelWrapper& whole, std::string place)
      : plan_(plan), models_(models), whole_(whole), place_(std::move(place)) {}

  StepResult run(const Progress& progress, const StepInput& input, const FaultPolicy& policy,
                 bool figures_of_all) override;

 private:
  void begin(const Progress& progress, double weight);
  void train(const Batch& batch, StepResult& result);
  void share_scale();
  void report(StepResult& result) const;

  const TrainStep& plan_;
  StepModels& models_;
  ModelWrapper& whole_;
  const std::string place_;
};

StepResult ModelsStep::run(const Progress& progress, const StepInput& input, const FaultPolicy&,
                           bool figures_of_all) {
  StepResult result;
  begin(progress, input.weight);
  if (!input.left_out) train(whole_.prepared(input.parts.at(0)), result);
  result.average(whole_.group(), input, figures_of_all);
  share_scale();
  report(result);
  return result;
}

/// Makes the smallest loss scale that of all models, and tells their wrappers the change. The
/// others stay at most twice as large, so that one overflow, or the growth of the smallest, takes
/// effect.
void ModelsStep::share_scale() {
  std::vector<TrainingStep*> scaled;
  for (auto& model : models_.models_)
    if (model.step_.options().scaler.enabled) scaled.push_back(&model.step_);
  double smallest = scaled.empty() ? 1 : scaled[0]->scaler().scale();
  for (auto* step : scaled) smallest = std::min(smallest, step->scaler().scale());
  for (auto* step : scaled)
    if (step->options().scaler.dynamic && step->scaler().scale() > 2 * smallest)
      step->scaler().load_state({2 * smallest, step->scaler().state().growth_tracker});
  const double before = std::exchange(*models_.models_.front().scale_, smallest);
  if (before == 0 || before == smallest) return;  // 0: the first step of this process
  for (auto& model : models_.models_) model.wrapper_.end_step({true, smallest / before});
}

void ModelsStep::begin(const Progress& progress, double weight) {
  models_.progress_ = progress;
  if (*models_.models_.front().scale_ == 0) share_scale();
  for (auto& model : models_.models_) {
    model.step_.set_learning_rates(progress);
    model.weight_ = weight;
    model.norm_ = std::nan("");
    model.updated_ = model.skipped_ = false;
    // Left by a train step that has thrown.
    if (model.pending_ || !model.wrapper_.gradients().empty()) model.zero_grad();
  }
}

void ModelsStep::train(const Batch& batch, StepResult& result) {
  try {
    result.add_figures(parse_losses(plan_.train(models_, batch)).values, 1);
  } catch (const c10::Error& error) {
    throw Error(place_ + message_of(error));
  }
  for (auto& model : models_.models_) {
    if (model.pending_)
      throw UsageError(place_ + model.name_ +
                       " has gradients that no step() has used, and the next train step would not "
                       "have them; expected step() or zero_grad() after the last backward()");
    if (!model.wrapper_.gradients().empty()) model.zero_grad();  // of another model's backward()
  }
}

/// A norm that is not finite is a fault, unless a loss scale may have made it.
void ModelsStep::report(StepResult& result) const {
  StepRecord& record = result.record;
  result.updated = true;
  for (const auto& model : models_.models_) {
    const bool first = result.updates.empty(), scaled = model.step_.options().scaler.enabled;
    const double norm = model.updated_ ? std::fabs(model.norm_) : std::nan("");
    const double scale = scaled ? *model.scale_ : 1;
    const double lr = model.wrapper_.optimizer().param_groups().front().options().get_lr();
    if (first) std::tie(record.grad_norm, record.lr, record.loss_scale) = std::tie(norm, lr, scale);
    record.figures.emplace_back(model.name_ + ".grad_norm", norm);
    record.figures.emplace_back(model.name_ + ".lr", lr);
    if (scaled) record.figures.emplace_back(model.name_ + ".loss_scale", scale);
    result.updates.push_back(model.updated_);
    if (!model.skipped_) continue;
    result.updated = false;
    if (scaled || !result.model.empty()) continue;
    result.norm = std::nan("");
    result.model = model.name_;
  }
}

std::unique_ptr<RunStep> make_models_step(const TrainStep& plan, StepModels& models,
                                          ModelWrapper& whole, std::string place) {
  return std::make_unique<ModelsStep>(plan, models, whole, std::move(place));
}

}  // namespace tessera::train
