#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/step/lr_scheduler.h"
#include "tessera/train/model_wrapper.h"

// Several models in one run: a step of training that the program writes itself. docs/models.md has
// an example.

#pragma GCC visibility push(default)
namespace tessera {
namespace train {
class [[gnu::visibility("hidden")]] ModelsStep;
class [[gnu::visibility("hidden")]] TrainingStep;
}  // namespace train

/// One of the models of a run with its wrapper and its optimizer, as a train step uses it. All
/// ranks make the same calls in the same order. If models have a loss scale, the smallest one is
/// that of all losses in a train step. Collective unless marked "Local.".
class StepModel {
 public:
  /// The trainer makes them. `place`: of the train step in the config, for errors. The others must
  /// live longer.
  StepModel(std::string place, std::string name, ModelWrapper& wrapper, train::TrainingStep& step);

  /// The result of the module's predict(batch) or forward(inputs), called through the wrapper, in
  /// the precision of the config. UsageError if the module has neither.
  at::Tensor forward(const at::Tensor& inputs) { return forward(Batch{inputs, {}, {}}); }
  at::Tensor forward(const Batch& batch);
  /// The result of `function`, which uses the module in another way.
  at::Tensor call(const std::function<at::Tensor()>& function);

  /// Adds the gradients of `loss`, the mean over this rank's samples. It may depend on several
  /// models; then the others get gradients too, unless they are frozen, and step() of each model
  /// uses them. If the loss is not finite, all elements of the gradients are NaN.
  void backward(const at::Tensor& loss);
  /// Clips the mean gradient over the ranks, updates the parameters and removes the gradients.
  /// Returns whether the parameters have changed; they have not if the norm of the gradient is not
  /// finite. UsageError without gradients since the last step() or zero_grad().
  bool step();
  /// backward() and step().
  bool update_params(const at::Tensor& loss);
  /// Removes the gradients. The end of a train step does the same for all models. Local.
  void zero_grad();

  /// No gradients of this model are communicated while the result is alive. Null for a wrapper
  /// without such a mode. Local.
  std::unique_ptr<NoSync> no_sync() { return wrapper_.no_sync(); }
  /// The parameters get no gradients while the result is alive. Local.
  [[nodiscard]] std::shared_ptr<void> freeze();

  const std::string& name() const { return name_; }                 ///< Local.
  torch::nn::Module& module() { return *wrapper_.model().module; }  ///< Local.
  ModelWrapper& wrapper() { return wrapper_; }                      ///< Local.
  /// The norm of the gradient in the last step() of this train step, before clipping. Local.
  double grad_norm() const { return norm_; }

 private:
  friend class StepModels;
  friend class train::ModelsStep;

  std::string place_, name_;  // place_: of the train step in the config
  ModelWrapper& wrapper_;
  train::TrainingStep& step_;
  double weight_ = 1;                       // of this rank's loss in the mean over the ranks
  double norm_ = 0;                         // of the gradient of the last step()
  bool pending_ = false;                    // a backward() whose gradients no step() has used
  bool updated_ = false, skipped_ = false;  // whether a step() of this train step was (not) made
  std::shared_ptr<double> scale_;           // of the losses of all models; 0: not known yet
};

/// The models of a run by name. Local.
class StepModels {
 public:
  /// The trainer makes them.
  StepModels(std::vector<StepModel> models, ProcessGroup group);

  /// UsageError for an unknown name, with the nearest known one.
  StepModel& operator[](const std::string& name);
  std::vector<std::string> names() const;  ///< In the order of the config.
  /// The progress of the run at the beginning of this train step.
  const Progress& progress() const { return progress_; }
  /// The ranks that train together.
  const ProcessGroup& group() const { return group_; }

 private:
  friend class train::ModelsStep;

  std::vector<StepModel> models_;
  ProcessGroup group_;
  Progress progress_;
};

/// The training of the models of a run: an entry of registry::train_steps(). The functions keep no
/// state between two calls, because no checkpoint would have it. Each is called on all ranks.
struct TrainStep {
  /// The names that the config must give the models. Empty: any.
  std::vector<std::string> models = {};
  /// Everything from forward to the updates, with this rank's batch. Returns named losses and
  /// figures for the log, in the form that parse_losses() takes; they do not affect the training.
  std::function<Losses(StepModels& models, const Batch& batch)> train;
  /// The losses of an evaluation: in evaluation mode, without gradients. Must not update. Empty:
  /// there are no evaluations.
  std::function<Losses(StepModels& models, const Batch& batch)> evaluate = {};
  /// The prediction that metrics take, and TrainingSession::predict(). Empty: none.
  std::function<at::Tensor(StepModels& models, const Batch& batch)> predict = {};
};

}  // namespace tessera
#pragma GCC visibility pop
