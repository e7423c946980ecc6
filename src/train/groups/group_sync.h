#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint_store.h"
#include "tessera/local_sgd.h"
#include "tessera/train/model_wrapper.h"
#include "train/groups/training_groups.h"

namespace tessera::train {

/// The synchronisation of the groups of a run, and its state in checkpoints.
class GroupSync {
 public:
  /// Gives all groups the parameters of group 0. Collective.
  GroupSync(const LocalSgdConfig& config, const TrainingGroups& groups, ModelWrapper& wrapper);

  /// Whether the groups meet after `steps` steps. Local.
  bool meets_after(int64_t steps) const { return steps % config_.options.sync_every == 0; }
  /// Call it after each step, also after one without an update. Collective where the groups meet,
  /// otherwise local.
  void step() { local_.step(); }
  /// Makes the parameters of all groups equal, unless the last step has. Collective.
  void synchronize() { local_.synchronize(); }

  /// Adds the state of this rank, and returns a description for load(). Collective if differences
  /// are under way.
  nlohmann::ordered_json save(CheckpointWriter& writer);
  /// Loads the state of the group `from` of the run that wrote the checkpoint. `saved`: the result
  /// of save(), or null. If it is of another outer optimizer or wire, a new state begins after
  /// `steps` steps. Returns whether the state was loaded. Local.
  bool load(const Checkpoint& checkpoint, const nlohmann::ordered_json& saved, int from,
            int64_t steps);

 private:
  nlohmann::ordered_json description() const;

  LocalSgdConfig config_;
  const TrainingGroups& groups_;
  LocalSgd local_;
};

}  // namespace tessera::train
