#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint_store.h"
#include "tessera/process_group.h"
#include "tessera/train/config.h"
#include "tessera/train/model_wrapper.h"

namespace tessera::train {

/// The ranks that train together in each step. This class is the plain case: all ranks are one
/// group. The class for parallel.local_sgd, whose groups meet every few steps, derives from it
/// (separate_groups.cpp). Group 0 has the run's rank 0; its parameters are written to files. Local,
/// unless stated otherwise.
class TrainingGroups {
 public:
  explicit TrainingGroups(ProcessGroup all) : all_(std::move(all)), inner_(all_) {}
  virtual ~TrainingGroups() = default;

  int count() const { return count_; }
  int number() const { return number_; }  ///< of this rank's group
  bool first() const { return number_ == 0; }
  /// This rank's group, which trains together in every step.
  const ProcessGroup& inner() const { return inner_; }
  /// The number in the run of `rank` of `group`.
  int rank_in_run(const ProcessGroup& group, int rank) const;
  /// "2 groups of 4 ranks".
  std::string describe() const;

  /// The part of the run's first line about groups, after a comma.
  virtual std::string note() const { return ""; }
  /// "group 1 (ranks 2, 3): ", the beginning of a message that only this group has; empty if there
  /// are no others.
  virtual std::string label() const { return ""; }
  /// For messages: the ranks that skip a step when inner() skips it.
  virtual std::string scope() const { return "on all ranks"; }
  /// Traffic of the run.
  virtual CommStats stats() const { return all_.stats(); }
  virtual std::optional<std::string> latest_sound(const std::string& folder) const {
    return latest_sound_checkpoint(folder, inner_);  // collective within inner()
  }

  /// Gives all groups the parameters of group 0. `wrapper` must live longer. Collective.
  virtual void start(ModelWrapper& wrapper) { (void)wrapper; }
  /// Call it after each step, also after one without an update; `steps` have been done. `flags` are
  /// sums over inner(). Where the groups meet they become sums over all ranks, else zeros. Returns
  /// whether a group has asked for the end. Collective where the groups meet.
  virtual bool end_step(std::vector<double>& flags, int64_t steps) {
    (void)flags, (void)steps;
    return false;
  }
  /// All ranks of inner() ask for the end. Returns true if the run ends at once.
  virtual bool ask_to_stop() { return true; }
  /// Makes the parameters of all groups equal, unless the last step has. Collective.
  virtual void synchronize() {}
  /// Runs `part` on the ranks of group 0 while the others wait, for up to 30 minutes longer than
  /// usual. `part` must throw on all ranks of group 0 or on none; if it does, AgreedError on all
  /// ranks. Collective.
  virtual void in_first(const std::function<void()>& part) const { part(); }
  /// The means of `figures` over the groups; the same bits on all ranks. Collective.
  virtual std::map<std::string, double> mean(std::map<std::string, double> figures) const {
    return figures;
  }

  /// All ranks of inner() have the error `reason` in a step, with its origin on `ranks`. If other
  /// groups do not know of it, they get it in their next collective, and this throws AgreedError.
  /// Collective within inner().
  virtual void end_all(const std::string& reason, const std::vector<int>& ranks) const {
    (void)reason, (void)ranks;
  }
  /// True if a group has called end_all().
  virtual bool ended() const { return false; }

  /// Adds the state between the groups to a checkpoint, and returns a description for load(); null:
  /// there is none. Collective.
  virtual nlohmann::ordered_json save(CheckpointWriter& writer) {
    (void)writer;
    return {};
  }
  /// Loads the state of the group `from` of the run that wrote the checkpoint. `saved`: the result
  /// of save(), or null. If `saved` is of another outer optimizer or wire, a new state begins after
  /// `steps` steps, and the result is false.
  virtual bool load(const Checkpoint& checkpoint, const nlohmann::ordered_json& saved, int from,
                    int64_t steps) {
    (void)checkpoint, (void)saved, (void)from, (void)steps;
    return true;
  }

 protected:
  ProcessGroup all_, inner_;
  int count_ = 1, number_ = 0;
};

/// The groups of a config. Throws UsageError on all ranks, with the place in the config, if the
/// ranks cannot be divided so. Collective.
std::unique_ptr<TrainingGroups> make_training_groups(const Config& config, const ProcessGroup& all);

}  // namespace tessera::train
