#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sharding/callback_guard.h"
#include "zero/local_optimizer.h"
#include "zero/mean_gradient.h"
#include "zero/norm_tracker.h"

namespace tessera::zero {

/// Option overlap_with_backward: each bucket is reduced, updated and gathered on the process
/// group's thread as soon as backward has completed it; step() only waits.
class OverlappedUpdates {
 public:
  OverlappedUpdates(ProcessGroup group, Shards& shards, MeanGradient& mean, LocalOptimizer& local,
                    NormTracker& norm, torch::optim::Optimizer& visible, bool find_unused,
                    std::string prefix);

  /// Starts the update of bucket `index`. Called from within backward, in the order of the buckets.
  /// UsageError on a second backward before step(). Collective; does not block.
  void send(size_t index);
  /// Buckets have been sent and wait() has not been called since.
  bool under_way() const { return !sent_.empty(); }
  /// Waits for what was sent. Blocks.
  void wait();
  /// A bucket was updated with the options of its backward: an option that has changed since is a
  /// UsageError on every rank.
  void check_options_unchanged();

 private:
  std::function<bool(size_t)> exchange_use(const ShardBucket& bucket);
  void update_from_segment(size_t index, const std::function<bool(size_t)>& is_used);

  ProcessGroup group_;
  Shards& shards_;
  MeanGradient& mean_;
  LocalOptimizer& local_;
  NormTracker& norm_;
  torch::optim::Optimizer& visible_;
  bool find_unused_;
  std::string prefix_;
  std::vector<Work> sent_;
  std::vector<OptionMap> options_of_backward_;  // by group
  sharding::CallbackGuard callback_guard_;
};

}  // namespace tessera::zero
