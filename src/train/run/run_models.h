#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/step/weight_average.h"
#include "train/state/run_weights.h"
#include "train/state/saved_state.h"
#include "train/step/models_step.h"
#include "train/step/training_step.h"

namespace tessera::train {

/// One model of a run.
struct RunModel {
  const ModelSections& own;
  TrainedModel model = {};
  std::unique_ptr<RunWeights> weights = {};
  std::unique_ptr<ModelWrapper> wrapper = {};
  std::unique_ptr<TrainingStep> step = {};
  std::unique_ptr<WeightAverage> average = {};  ///< null: none
};

/// The models of a run with their wrappers, optimizers and averages, and all of them as one: the
/// only model itself, or a ModelsWrapper over several. Collective unless marked "Local.".
class RunModels {
 public:
  explicit RunModels(RunContext& context) : context_(context) {}
  RunModels(const RunModels&) = delete;

  // In this order.

  /// Builds the models. `init`: the models get their weights from the config's files. Local, unless
  /// layers communicate.
  void build(const ProcessGroup& layers, bool init);
  /// Makes wrappers and steps, and loads the weights. `resumed`: the checkpoint; null: none.
  void wrap(const Checkpoint* resumed);
  /// Loads the rest of a checkpoint. `averages`: one for each shard of whole(), or empty. Local.
  void restore(const std::map<std::string, SavedModel>& saved,
               const std::vector<at::Tensor>& averages);

  const std::deque<RunModel>& each() const { return models_; }                          ///< Local.
  ModelWrapper& whole() { return joined_ ? *joined_ : *models_[0].wrapper; }            ///< Local.
  RunWeights& weights() { return all_weights_ ? *all_weights_ : *models_[0].weights; }  ///< Local.
  RunStep& step() { return models_step_ ? *models_step_ : *models_[0].step; }           ///< Local.
  std::map<std::string, SavedModel> state() const;                                      ///< Local.

  /// Freezes and thaws the parameters for step number `step`. Local.
  void begin_step(int64_t step);
  /// Updates the averages. Local.
  void end_step(const StepResult& result);
  /// The models have the averaged weights, where there are any, between one call and the next.
  void swap_averages();
  void drop_averages();  ///< The weights are averaged ones from now on. Local.
  /// One for each shard of whole(); undefined: none. Local.
  std::vector<at::Tensor> averages() const;
  /// Bytes of optimizer state and averages in a checkpoint, if every rank has as many as this one.
  /// Local.
  int64_t state_bytes() const;
  /// Writes train.save and train.save_optimizer.
  void save(int64_t steps);

 private:
  void join();

  RunContext& context_;
  std::deque<RunModel> models_;
  // With several models.
  TrainedModel all_;
  std::unique_ptr<RunWeights> all_weights_;
  std::unique_ptr<ModelWrapper> joined_;
  std::unique_ptr<StepModels> step_models_;
  std::unique_ptr<RunStep> models_step_;
};

}  // namespace tessera::train
