#pragma once

#include <functional>
#include <map>
#include <string>

#include "tessera/process_group.h"
#include "tessera/train/config.h"

namespace tessera::train {

/// The groups into which parallel.local_sgd divides the ranks of a run. Without it all ranks are
/// one group. Group 0 has the run's rank 0; its parameters are those that are written to files.
/// Local, unless stated otherwise.
class TrainingGroups {
 public:
  /// Throws UsageError on all ranks, with the place in the config, if the ranks cannot be divided
  /// so. Collective.
  TrainingGroups(const Config& config, ProcessGroup all);

  int count() const { return count_; }
  int number() const { return number_; }  ///< of this rank's group
  bool several() const { return count_ > 1; }
  bool first() const { return number_ == 0; }
  /// This rank's group, which trains together in every step.
  const ProcessGroup& inner() const { return inner_; }
  /// The ranks with this rank's place in their groups. Its rank numbers need not be those of the
  /// groups.
  const ProcessGroup& outer() const { return outer_; }
  /// The number in the run of `rank` of inner().
  int rank_in_run(int rank) const;
  /// "2 groups of 4 ranks".
  std::string describe() const;

  /// "group 1 (ranks 2, 3): ", the beginning of a message that only this group has; empty if there
  /// are no others.
  std::string label() const;

  /// Traffic of the run, inner() and outer() together.
  CommStats stats() const;
  /// Runs `part` on the ranks of group 0 while the others wait, for up to 30 minutes longer than
  /// usual. `part` throws on all ranks of group 0 or on none; then AgreedError on all ranks.
  /// Collective.
  void in_first(const std::function<void()>& part) const;
  /// The means of `figures` over the groups; the same bits on all ranks. Collective.
  std::map<std::string, double> mean(std::map<std::string, double> figures) const;

 private:
  ProcessGroup all_, inner_, outer_;
  int count_ = 1, number_ = 0;
};

}  // namespace tessera::train
