#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint_store.h"
#include "tessera/optim/torch_optimizer_state.h"
#include "tessera/safetensors.h"
#include "tessera/train/model_wrapper.h"
#include "train/state/run_context.h"

namespace tessera::train {

/// The files with the weights of one model of a run, or of all together: checkpoints, model.init
/// and train.save. Also the state of an optimizer of Python's torch.optim: optimizer.init and
/// train.save_optimizer. Collective unless marked "Local.".
class RunWeights {
 public:
  /// `own`: the sections of the model, or of the run for all models together. The arguments must
  /// live longer. Refuses tensors that the files of this run cannot hold, such as
  /// those with the format's reserved name. Otherwise only the first save would fail. Local.
  RunWeights(RunContext& context, const ModelSections& own, const TrainedModel& model);

  int64_t elements() const { return elements_; }  ///< of the parameters
  int64_t bytes(bool with_buffers) const;         ///< Local.
  std::vector<std::string> buffer_names() const;  ///< Local.

  /// Opens the weights of the checkpoint. Called within its read_together().
  void open(const Checkpoint& checkpoint);
  /// Opens model.init and optimizer.init, if the config has them. Local.
  void open_init();
  /// Gives the wrapper the opened state. `checkpoint`: its source; null: the config's files.
  /// `wrapper` must live longer.
  void load(ModelWrapper& wrapper, const Checkpoint* checkpoint);

  /// Every rank of group 0 writes its part of the weights. Buffers are rank 0's, because ranks may
  /// differ in them. Collective within group 0.
  void add_to(CheckpointWriter& writer);
  /// Writes train.save and train.save_optimizer, if the config has them.
  void save(int64_t steps);
  void save_optimizer();

 private:
  at::Tensor whole_weight(size_t i, int to);
  void skip_initial_values();
  void load_initial();
  void report_unmatched(const UnmatchedNames& names) const;
  void open_optimizer_init();
  void load_optimizer_init();
  std::vector<std::string> names_for_python(const std::vector<size_t>& group_sizes) const;
  void report_other_options() const;

  RunContext& context_;
  const ModelSections& own_;
  const TrainedModel& model_;
  ModelWrapper* wrapper_ = nullptr;        // after load()
  std::vector<SafetensorsSpec> specs_;     // parameters, then buffers
  size_t parameter_count_ = 0;             // of specs_
  int64_t elements_ = 0;                   // of the parameters
  std::unique_ptr<TensorSource> initial_;  // the checkpoint's weights, or model.init; until loaded
  WeightsMatch initial_names_;
  std::optional<TorchOptimizerStateFile> optimizer_init_;  // optimizer.init, until it is loaded
  std::vector<std::string> optimizer_names_;               // of the parameters in it
};

}  // namespace tessera::train
