#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "tessera/join.h"
#include "tessera/optim.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/optim/state_slice.h"
#include "tessera/process_group.h"
#include "tessera/step/losses.h"
#include "tessera/step/no_sync.h"
#include "tessera/step/paramwise.h"
#include "tessera/train/trained_model.h"

namespace tessera {

class OptimWrapper;

/// What one rank holds, in bytes. State that an optimizer makes lazily counts once it exists.
struct MemoryUse {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer_state = 0;

  int64_t total() const { return parameters + gradients + optimizer_state; }
};

/// What is done with gradients when they become an update.
struct GradientRules {
  std::optional<double> clip_norm = {};
  std::optional<double> clip_value = {};
};

/// A model and its optimizer under one way of training on a group of ranks (mmengine's model
/// wrapper): everything a loop needs that depends on `parallel.type`. One class implements each.
/// All ranks call all of it, in the same order, but for what is said to be local; it blocks.
class ModelWrapper {
 public:
  ModelWrapper(TrainedModel model, Preprocessor preprocessor, ProcessGroup group);
  virtual ~ModelWrapper() = default;

  /// Preprocessing, forward, losses, update. Returns the named figures of this rank's batch, losses
  /// and others.
  std::vector<std::pair<std::string, at::Tensor>> train_step(const Batch& batch,
                                                             OptimWrapper& optimizer);
  /// Of a rank out of data, while the others are in train_step.
  void shadow_train_step(OptimWrapper& optimizer);
  /// The prediction for a batch, without gradients; the module is in evaluation mode, if the caller
  /// put it there.
  at::Tensor val_step(const Batch& batch);
  at::Tensor test_step(const Batch& batch) { return val_step(batch); }
  /// The losses and figures of a batch, without gradients.
  ParsedLosses val_losses(const Batch& batch);

  const TrainedModel& model() const { return model_; }
  const ProcessGroup& group() const { return group_; }

  /// Backward of this rank's loss; undefined: a rank out of data.
  virtual void backward(const at::Tensor& loss) { loss.backward(); }
  virtual void shadow_backward() {}
  /// Nothing is sent while it lives. Local.
  virtual std::unique_ptr<NoSync> no_sync() { return nullptr; }
  /// The `.grad`s that update() will use as they stand on this rank: what unscaling multiplies.
  /// Local.
  virtual std::vector<at::Tensor> gradients() = 0;
  /// The global mean gradient, clipped, updates the parameters; the gradients are then gone. On
  /// return every rank's model has the new parameters. Returns the 2-norm before clipping.
  virtual double update(const GradientRules& rules) = 0;
  /// Lets go of the gradients without an update. Local.
  virtual void drop_gradients() = 0;
  /// Whether update() may be asked to unscale or clip: not where backward already updates.
  virtual bool updates_in_backward() const { return false; }

  /// What learning rates are set in. Local.
  virtual torch::optim::Optimizer& optimizer() = 0;
  /// What takes part in a join; null when this way of training cannot. Local.
  virtual Joinable* joinable() { return nullptr; }

  /// This rank's own parameters: every element of the model is in some rank's shards, and written
  /// by its owner. Local.
  virtual std::vector<ParameterShard> shards() = 0;
  /// After shards were written to: all ranks' models have their values.
  virtual void publish_shards() = 0;
  /// Optimizer state of the shards. Local.
  virtual std::vector<StateSlice> state_slices() = 0;
  virtual void load_state_slices(const std::vector<StateSlice>& slices) = 0;
  /// The optimizer's whole state by parameter name, gathered to rank 0 by itself; other ranks get
  /// an empty one. As of any other wrapper, and of the plain optimizer.
  virtual OptimizerStateDict optimizer_state_dict() = 0;
  /// Takes this rank's part of `dict`, the same on all ranks.
  virtual void load_optimizer_state_dict(const OptimizerStateDict& dict) = 0;
  /// Whether this rank is the one that saves its shards' state: one of those that hold the same.
  /// Local.
  virtual bool saves_shards() const { return true; }
  /// While it lives, rank 0's module has whole parameters; null where they always are whole.
  virtual std::shared_ptr<void> whole_on_rank0() { return nullptr; }
  /// A whole parameter on rank 0; other ranks' result is undefined. Streams a model that no rank
  /// holds.
  virtual at::Tensor whole_parameter(const std::string& name) = 0;
  /// Further state of this rank, by name (a communication hook's). Local.
  virtual std::vector<std::pair<std::string, at::Tensor>> extra_state() { return {}; }
  virtual void load_extra_state(const std::vector<std::pair<std::string, at::Tensor>>& state);

  virtual MemoryUse memory() = 0;  ///< After the first step. Local.
  /// What a single process would hold, given what the ranks do. Local.
  virtual MemoryUse unsharded(const std::vector<MemoryUse>& ranks) const { return ranks.front(); }
  /// What a rank should hold then, by the formula of this way of training. Local.
  virtual MemoryUse formula(const MemoryUse& unsharded) const { return unsharded; }

 protected:
  /// Mean loss over this rank's batch with its graph, through the wrapper's own forward; notes the
  /// figures.
  virtual at::Tensor forward(const Batch& batch) = 0;
  /// Runs `function`, which uses the module, outside training.
  virtual void run(const std::function<void()>& function) { function(); }
  /// A batch as the module computes with it. While it runs. Local.
  virtual Batch cast(Batch batch) const { return batch; }
  /// What `forward` ends in: the model's losses, parsed.
  at::Tensor compute_loss(const Batch& batch);

  TrainedModel model_;
  ProcessGroup group_;

 private:
  Preprocessor preprocessor_;
  std::vector<std::pair<std::string, at::Tensor>> figures_;
};

/// The configured optimizer: from the registry, with the rules for single parameters.
struct OptimizerPlan {
  std::string type;
  OptionMap options;
  ParamwiseOptions paramwise;

  OptimizerFactory factory() const;
  /// Parameters of the module, those of equal options together.
  std::vector<ParameterGroup> groups(const torch::nn::Module& module,
                                     bool frozen_too = false) const;
};

/// What a wrapper is made of.
struct WrapperContext {
  TrainedModel model;
  Preprocessor preprocessor;
  ProcessGroup group;
  OptimizerPlan optimizer;
};

/// A configured wrapper.
struct WrapperPlan {
  bool distributed = true;  ///< works with more than one rank
  bool updates_in_backward = false;
  std::string optimizer_type = {};  ///< the optimizer that its options name; empty: none
  std::function<std::unique_ptr<ModelWrapper>(WrapperContext)> make = {};
};

}  // namespace tessera
