#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/join.h"
#include "tessera/optim.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/optim/state_slice.h"
#include "tessera/process_group.h"
#include "tessera/step/losses.h"
#include "tessera/step/no_sync.h"
#include "tessera/step/paramwise.h"
#include "tessera/step/step_end.h"
#include "tessera/train/trained_model.h"

#pragma GCC visibility push(default)
namespace tessera {

class OptimWrapper;

/// The memory of one rank, in bytes. State that an optimizer creates lazily counts once it exists.
struct MemoryUse {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer_state = 0;

  int64_t total() const { return parameters + gradients + optimizer_state; }
};

/// Consequence of a norm of the gradient that is infinite or NaN, on every rank.
enum class NonfiniteNorm {
  update,  ///< the update takes place
  error,   ///< an Error; nothing is updated
  skip,    ///< the gradients are dropped; nothing is updated
  /// As skip, but the caller discards the parameters: a type that gets the norm from the update
  /// itself may update.
  give_up
};

/// Clipping of the gradients before an update; no value: no clipping.
struct GradientRules {
  std::optional<double> clip_norm = {};
  std::optional<double> clip_value = {};
  double norm_type = 2;  ///< of clip_norm and of the norm that is reported: any p > 0, or infinity
  NonfiniteNorm nonfinite = NonfiniteNorm::update;

  /// Takes the norm before clipping. Throws the Error of NonfiniteNorm::error; else: update or not.
  bool allow(double norm) const;
};

/// The origin of gradients that are not finite.
struct NonfiniteGradient {
  int rank = -1;          ///< whose own gradient it is; -1: not found
  std::string parameter;  ///< its first parameter with such a gradient
};

/// The results of an evaluation for one batch, beside its losses.
struct Evaluated {
  Batch batch;            ///< after the preprocessor
  at::Tensor prediction;  ///< as ModelWrapper::val_step() returns it
};

/// A model and its optimizer, trained in one way on a group of ranks (after mmengine's model
/// wrapper). It has everything that a training loop needs and that depends on `parallel.type`; each
/// type is one derived class. Collective unless marked "Local.": all ranks call the members in the
/// same order, and the calls block.
class ModelWrapper {
 public:
  ModelWrapper(TrainedModel model, Preprocessor preprocessor, ProcessGroup group);
  virtual ~ModelWrapper() = default;

  /// The batch after the preprocessor, for training. UsageError for a parameter that was frozen at
  /// construction and is trainable now. Local.
  Batch prepared(const Batch& batch) const;
  /// Runs `function`, which uses the module, as the wrapper's forward. Returns its result, with its
  /// graph unless gradients are off.
  virtual at::Tensor call(const std::function<at::Tensor()>& function) { return function(); }
  /// The mean loss over this rank's batch, which is prepared, with its graph, computed through
  /// call(). Records the figures.
  at::Tensor forward(const Batch& batch);
  /// The batch in the dtype that the module computes with. Used within call(). Local.
  virtual Batch cast(Batch batch) const { return batch; }
  /// One iteration of `optimizer`: prepared(), forward, backward and update. Returns
  /// ParsedLosses::values of this rank's batch: the total as "loss", then the other figures.
  std::vector<std::pair<std::string, at::Tensor>> train_step(const Batch& batch,
                                                             OptimWrapper& optimizer);
  /// A rank without data calls this while the others are in train_step().
  void shadow_train_step(OptimWrapper& optimizer);
  /// The prediction for a batch, without gradients. The caller sets the module's evaluation mode.
  at::Tensor val_step(const Batch& batch);
  at::Tensor test_step(const Batch& batch) { return val_step(batch); }
  /// The losses and figures of a batch, without gradients. `evaluated`: gets the batch after the
  /// preprocessor and the result of val_step(); may be null.
  ParsedLosses val_losses(const Batch& batch, Evaluated* evaluated = nullptr);

  /// This rank's figures of the last forward(), as train_step() returns them. Local.
  const std::vector<std::pair<std::string, at::Tensor>>& figures() const { return figures_; }

  const TrainedModel& model() const { return model_; }
  /// The ranks that train together in every step. With parallel.local_sgd these are the ranks of
  /// one of the groups, otherwise all ranks of the run.
  const ProcessGroup& group() const { return group_; }

  /// Backward of this rank's loss.
  virtual void backward(const at::Tensor& loss) { loss.backward(); }
  virtual void shadow_backward() {}
  /// No gradients are communicated while the result is alive. Local.
  virtual std::unique_ptr<NoSync> no_sync() { return nullptr; }
  /// This rank's `.grad` tensors that update() will use; unscaling multiplies them. Local.
  virtual std::vector<at::Tensor> gradients() = 0;
  /// Clips the global mean gradient, updates the parameters with it and removes the gradients. On
  /// return every rank's model has the new parameters. Returns the norm before clipping.
  virtual double update(const GradientRules& rules) = 0;
  /// After update() has returned a norm that is not finite: finds the first rank whose own gradient
  /// is not finite. `parts` are this rank's micro-batches; every rank has equally many. Runs their
  /// forward and backward passes again, without an update.
  virtual NonfiniteGradient find_nonfinite_gradient(const std::vector<Batch>& parts);
  /// Removes the gradients without an update. Local.
  virtual void drop_gradients() = 0;
  /// After update() or drop_gradients(), for gradients that travel rounded (option `wire`): see
  /// StepEnd. By default nothing. Local.
  virtual void end_step(StepEnd /*end*/) {}

  /// The optimizer whose parameter groups have the learning rates. Local.
  virtual torch::optim::Optimizer& optimizer() = 0;
  /// The object that takes part in a join; null when this type does not support joins. Local.
  virtual Joinable* joinable() { return nullptr; }

  /// Returns when all communication of Overlap::background is complete. The trainer calls it before
  /// hooks, which may use pointers. Local; blocks.
  virtual void wait() {}
  /// The parameter shards that this rank owns. Every element of the model belongs to the shards of
  /// some rank, and only its owner writes it. Local.
  virtual std::vector<ParameterShard> shards() = 0;
  /// The elements of parameters that this rank reads when the model is loaded; publish_shards()
  /// gives it the other elements that it holds. By default shards(), and frozen parameters as a
  /// whole. Local.
  virtual std::vector<ParameterShard> loaded_shards();
  /// The tensors, by name, that all ranks must hold with equal bits between two steps, for
  /// check_replicas(): by default the buffers and the shards. Shards that may differ have different
  /// names. Local.
  virtual std::vector<std::pair<std::string, at::Tensor>> replicas();
  /// The ranks of group() whose shards() are equal copies of this rank's. A group of this rank
  /// alone is always correct; if the copies are known, LocalSgd sends each value once. Local.
  virtual ProcessGroup shard_copies() const { return {}; }
  /// Call before writing to the shards: no rank reads parameters when it returns. Collective.
  virtual void before_shard_writes() {}
  /// Call after writing to the shards: updates all ranks' models with the new values.
  virtual void publish_shards() = 0;
  /// The optimizer state of the shards. Local.
  virtual std::vector<StateSlice> state_slices() = 0;
  /// Loads the optimizer state of shards(). Drops each tensor of `slices` when it has been copied.
  /// Local.
  virtual void load_state_slices(std::vector<StateSlice>&& slices) = 0;
  /// The whole optimizer state by parameter name, gathered on rank 0; other ranks get an empty one.
  /// The format is the same for all wrappers and for a plain optimizer.
  virtual OptimizerStateDict optimizer_state_dict() = 0;
  /// Loads this rank's part of `dict`, which is the same on all ranks.
  virtual void load_optimizer_state_dict(const OptimizerStateDict& dict) = 0;
  /// Ascending numbers of the shards() whose state this rank saves. If several ranks hold the same
  /// shard, exactly one saves it. By default all. Local.
  virtual std::vector<size_t> saved_shards();
  /// While the result is alive, rank 0's module has whole parameters. Null where parameters are
  /// always whole.
  virtual std::shared_ptr<void> whole_on_rank0() { return nullptr; }
  /// A whole parameter on rank `to`; on other ranks an undefined tensor, or their own copy where
  /// every rank has one. Serves to write a model that no rank can hold as a whole, one parameter at
  /// a time.
  virtual at::Tensor whole_parameter(const std::string& name, int to) = 0;
  /// Other state of this rank by name, such as a communication hook's. Local.
  virtual std::vector<std::pair<std::string, at::Tensor>> extra_state() { return {}; }
  virtual void load_extra_state(const std::vector<std::pair<std::string, at::Tensor>>& state);

  virtual MemoryUse memory() = 0;  ///< Call after the first step. Local.
  /// The memory of a single process that trains the same model, derived from all ranks' memory.
  /// Local.
  virtual MemoryUse unsharded(const std::vector<MemoryUse>& ranks) const { return ranks.front(); }
  /// The memory of a rank by the formula of this type, such as 1/N of single_process. Local.
  virtual MemoryUse formula(const MemoryUse& unsharded) const { return unsharded; }

 protected:
  /// Adds the buffers to `replicas`, if they are to be the same on all ranks. Local.
  void add_buffers(std::vector<std::pair<std::string, at::Tensor>>& replicas) const;

  TrainedModel model_;
  ProcessGroup group_;
  /// True if the buffers are the same on all ranks between two steps.
  bool buffers_are_equal_ = true;

 private:
  void check_frozen() const;

  Preprocessor preprocessor_;
  NamedParameters frozen_;  // at construction
  std::vector<std::pair<std::string, at::Tensor>> figures_;
};

/// An optimizer from the registry with its options and with the rules for single parameters.
struct OptimizerPlan {
  std::string type;
  OptionMap options;
  ParamwiseOptions paramwise;
  bool master_weights = false;  ///< with_master_weights(): set where a parameter has 16 bits

  OptimizerFactory factory() const;
  /// The module's parameters, grouped by equal options. `frozen_too`: includes parameters that do
  /// not require gradients.
  std::vector<ParameterGroup> groups(const torch::nn::Module& module,
                                     bool frozen_too = false) const;
};

/// The arguments from which a wrapper is constructed.
struct WrapperContext {
  TrainedModel model;
  Preprocessor preprocessor;
  ProcessGroup group;
  OptimizerPlan optimizer;
};

/// A wrapper with its options.
struct WrapperPlan {
  bool distributed = true;          ///< works with more than one rank
  std::string optimizer_type = {};  ///< optimizer named by the wrapper's options; empty: none
  std::function<std::unique_ptr<ModelWrapper>(WrapperContext)> make = {};
};

}  // namespace tessera
#pragma GCC visibility pop
