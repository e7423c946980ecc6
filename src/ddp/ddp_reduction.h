#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/background_updates.h"
#include "ddp/bucket_order.h"
#include "ddp/ddp_model.h"
#include "sharding/gradients/forward_writes.h"
#include "sharding/gradients/gradient_wire.h"
#include "sharding/gradients/reducer.h"

namespace tessera {

/// The passes of a DistributedDataParallel: buckets of gradients are all-reduced, by the mean or by
/// a hook, when backward has completed them.
class DdpReduction : private sharding::ReductionPolicy {
 public:
  /// Compares the options and gives all ranks rank 0's model. `model` and `options` live longer.
  /// Collective.
  DdpReduction(DdpModel& model, const DistributedDataParallelOptions& options);

  sharding::Reducer& reducer() { return *reducer_; }
  /// A forward pass begins. Collective if a backward that synchronises will follow.
  void before_forward();
  /// The passes of the other ranks, on a rank without data. Collective.
  void shadow();
  void set_join(const JoinIteration& iteration);
  /// Returns when all reductions and updates are complete. Local; blocks.
  void wait();
  void end_step(StepEnd end);

 private:
  /// A reduction that has begun.
  struct Started {
    size_t bucket;
    Work work;
    std::function<void()> finish;  ///< Used by a hook instead of `work`.
  };

  void start(size_t index) override;
  void finish() override;
  void finished() override;
  void abandon() override;

  bool overlaps_in_background() const;
  sharding::Lanes lanes() const;
  void begin_pass();
  void make_reducer();
  void follow_trainability();
  std::vector<sharding::Bucket> make_buckets();
  void reduce(size_t index);
  void call_hook(size_t index);
  void wait_for_buckets();
  std::string tag(size_t bucket) const;
  void order_by_arrival();
  void order_for_next_forward(double share);

  DdpModel& model_;
  const DistributedDataParallelOptions& options_;
  const bool in_background_;  // Overlap::background, where it is possible
  std::optional<sharding::GradientWire> wire_;
  sharding::ForwardWrites forward_writes_;
  uint64_t forwards_ = 0, backwards_ = 0;  // that synchronise, since construction
  std::vector<size_t> complete_;           // buckets, with Overlap::none
  std::vector<Started> started_;
  bool uncommitted_ = false;  // wire_ has reductions of the last backward
  BucketOrder order_;
  int divisor_;
  int publisher_ = 0;  // the rank whose order of arrival is used
  std::unique_ptr<sharding::Reducer> reducer_;
  std::optional<BackgroundUpdates> updates_;  // with in_background_
};

}  // namespace tessera
