#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint_store.h"
#include "tessera/step/early_stop.h"
#include "tessera/train/config.h"
#include "train/state/saved_state.h"

namespace tessera::train {

/// The best evaluations of a run: which checkpoints checkpoint.keep_best keeps, whether
/// train.early_stop ends the run, and a copy of the best weights. All ranks pass the same figures.
/// Local, unless stated otherwise.
class BestEvaluations {
 public:
  explicit BestEvaluations(const Config& config);

  struct Verdict {
    bool stop = false;          ///< no improvement for too long
    bool best_weights = false;  ///< call take_weights()
  };
  /// Takes the figures of the evaluation after `step` steps. A repeated evaluation counts again.
  Verdict observe(int64_t step, const std::map<std::string, double>& figures);

  /// The steps whose checkpoints are kept, the best one first.
  std::vector<int64_t> kept() const;
  bool keeps(int64_t step) const;
  /// ", best accuracy 0.9312" for a step whose checkpoint is kept, else "".
  std::string note(int64_t step) const;

  /// Copies the evaluated weights: tensors of the wrapper's shards, and the module's buffers.
  void take_weights(const std::vector<at::Tensor>& shards, const torch::nn::Module& module);
  /// Gives the copied weights to the wrapper permanently. Returns the step of their evaluation; no
  /// value: there are none. Collective.
  std::optional<int64_t> give_weights(ModelWrapper& wrapper) const;

  /// True if there are weights; the same on all ranks.
  bool has_weights() const { return best_.has_value(); }
  /// One for each shard.
  const std::vector<at::Tensor>& weights() const { return weights_; }
  /// Adds the buffers to a checkpoint. On rank 0.
  void add_buffers(CheckpointWriter& writer) const;
  /// Takes the weights of a checkpoint, one for each shard; undefined: the checkpoint has none.
  /// Within read_together(). Call it after load_state().
  void load_weights(const Checkpoint& checkpoint, std::vector<at::Tensor> weights);

  void save_state(BestState& state) const;
  /// `own`: the checkpoint is in this run's folder, with the other kept checkpoints. Returns
  /// warnings.
  std::vector<std::string> load_state(const BestState& state, bool own);
  /// True if an early stop has ended this run. A larger patience continues it, as does a run that
  /// begins with its checkpoint.
  bool has_stopped() const { return stop_ && stop_->state().stopped; }

 private:
  const EarlyStopConfig& stop_config_;
  const KeepBestConfig& keep_config_;
  std::optional<EarlyStop> stop_;
  std::vector<RankedStep> kept_;    // the best one first
  std::optional<RankedStep> best_;  // of weights_
  std::vector<at::Tensor> weights_;
  std::vector<std::pair<std::string, at::Tensor>> buffers_;
};

}  // namespace tessera::train
