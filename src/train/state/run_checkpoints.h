#pragma once

#include <optional>
#include <string>

#include "tessera/checkpoint_store.h"
#include "train/state/best_evaluations.h"
#include "train/state/run_weights.h"
#include "train/state/saved_state.h"

namespace tessera::train {

/// The parts of a run whose tensors are saved.
struct SavedParts {
  ModelWrapper& wrapper;
  RunWeights& weights;
  std::vector<at::Tensor> averages;  ///< one for each shard; undefined: none
  BestEvaluations& best;
};

/// The checkpoints of a run: the one from which it resumes, and those that it writes. Collective
/// unless marked "Local.".
class RunCheckpoints {
 public:
  /// Opens checkpoint.folder for writing, and the checkpoint to resume from.
  explicit RunCheckpoints(RunContext& context);

  bool write() const { return store_.has_value(); }  ///< True if there is a folder. Local.
  /// The checkpoint from which the run resumes; null: none. Local.
  const Checkpoint* resumed() const { return resumed_ ? &*resumed_ : nullptr; }

  /// The file of that state. Local.
  std::string state_file() const;
  /// Reads the state of this rank's group. Throws UsageError if the run had another global batch,
  /// or the model's weights another meaning. Within resumed()->read_together().
  SavedState read_state();
  /// Restores the tensors, the best evaluations and the random numbers. Returns the saved average
  /// of each of wrapper.shards(); undefined: none. Within read_together(); call publish() after it.
  std::vector<at::Tensor> restore(const SavedState& state, ModelWrapper& wrapper,
                                  BestEvaluations& best);
  void publish(ModelWrapper& wrapper) const {
    if (resumed_group_ > 0) wrapper.publish_shards();
  }

  /// Writes a checkpoint, unless the one of this step is there. Returns its path, or "". `state_of`
  /// runs on the rank that writes it, within the checkpoint's time-out: hooks of the program may be
  /// slow there.
  std::string save(int64_t step, const std::function<SavedState()>& state_of,
                   const SavedParts& parts);
  /// The next save() writes in any case. Local.
  void save_again() { saved_at_ = -1; }

 private:
  std::string find();
  std::string open(const std::string& path);
  std::string set_aside_damaged(const std::string& path, const std::string& why);
  void check(const SavedState& state) const;
  void check(const ModelSections& own, const SavedModel& saved) const;
  std::vector<at::Tensor> restore_slices(const SavedState& state, ModelWrapper& wrapper,
                                         BestEvaluations& best);
  void restore_random(int64_t steps, ModelWrapper& wrapper);
  void restore_groups(int64_t steps);
  int groups_saved() const;
  std::vector<StateSlice> slices(const SavedParts& parts) const;

  RunContext& context_;
  std::optional<CheckpointStore> store_;
  std::optional<Checkpoint> resumed_;
  nlohmann::ordered_json resumed_groups_;  // the state that TrainingGroups saved in it
  int resumed_group_ = 0;                  // its group from which this rank's continues
  int64_t saved_at_ = -1;
};

}  // namespace tessera::train
