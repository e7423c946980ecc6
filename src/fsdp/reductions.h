#pragma once

#include <atomic>
#include <deque>

#include "comm/base/comm_stream.h"
#include "fsdp/host_sums.h"
#include "fsdp/join/join_leader.h"
#include "fsdp/model/sharded_model.h"
#include "sharding/callback_guard.h"
#include "sharding/detection/local_norms.h"
#include "sharding/gradients/gradient_wire.h"
#include "tessera/step/step_end.h"

namespace tessera::fsdp {

/// Reduces flat buffers to the gradients of the shards. A few reductions run at the same time; they
/// end in the order in which they began, because all ranks free the slots in the same order.
///
/// [Note: late gradients] With Overlap::background, reductions may run on when a backward has
/// ended. `.grad` of their shards are then views of pages of this owner that have no memory yet.
/// The first operator that takes one waits; the next forward or backward waits too.
class Reductions : public sharding::PageOwner {
 public:
  /// `recover`: after a divergence before a late gradient, makes the remaining reductions.
  /// Collective.
  Reductions(ShardedModel& model, const FullyShardedDataParallelOptions& options, FsdpStats& stats,
             JoinLeader& join_leader, std::function<void()> recover);
  ~Reductions() override;

  /// Begins to reduce the flat buffer of `flat`, in `turn` of this backward. `tag`: a text that
  /// distinguishes backwards.
  void begin(FlatParameter& flat, size_t turn, const std::string& tag);
  /// The slot of the reduction that has begun belongs to it alone.
  void begun();
  /// Waits until another reduction may begin.
  void make_room();
  /// Waits until no reduction of `flat` is under way, and until its gradients can be added to.
  void finish(const FlatParameter& flat);
  void finish_all();
  /// At the end of backward: waits for the reductions that cannot be late.
  void finish_early();
  /// Calls `take(flat, slot, used)` for each reduction that was not made because the ranks have
  /// diverged. All have ended.
  template <class Take>
  void take_back(Take&& take) {
    for (const auto& each : std::exchange(failed_, {})) {
      for (size_t m = 0; m < each->used.size(); ++m)
        if (each->late && each->used[m] && !each->adds[m])
          each->flat.shards[m].tensor.mutable_grad() = at::Tensor();
      take(each->flat, each->slot, each->used);
    }
  }
  /// Waits for late gradients.
  void finish_late();
  /// At the end of backward: `.grad` of the shards is up to date, or arrives late.
  void end_backward();
  /// Drops the results of reductions that are under way.
  void drop();
  /// See sharding::GradientWire. Outside of backward.
  void end_step(StepEnd end);

  void need(c10::ArrayRef<sharding::PageUse> uses, std::string_view op) override;

 private:
  struct Reduction {
    FlatParameter& flat;
    Work work = {};
    at::Tensor slot;
    at::Tensor part = {};    // with replicas: the sum over the shard group, then over the replicas
    std::vector<char> used;  // members that have a gradient
    std::vector<char> adds = {};  // members whose shard already has a gradient: the sum is added
    std::vector<at::Tensor> before = {};  // the same for shards with hooks, whose sum stays apart
    bool settled = false;
    bool late = false;
    double scale = 1;
    HostSums on_the_way = {};           // with cpu_offload
    std::atomic<bool> dropped = false;  // its backward was abandoned, so the result is not used
    comm::CommStream::Mark mark = {};
  };

  void make_segment(FlatParameter& flat);
  void set_aside(Reduction& reduction);
  void start(Reduction& reduction, size_t turn, const std::string& tag);
  void add(Reduction& reduction, int64_t offset, const at::Tensor& sum);
  void finish_one();
  void settle(Reduction& reduction);
  void fail(const std::shared_ptr<Reduction>& reduction);
  bool may_be_late(const Reduction& reduction) const;
  void wait_for_host_sums();
  std::set<sharding::LocalNorms::Gradient> shard_gradients() const;
  [[noreturn]] void refuse_own_norms() const;

  ShardedModel& model_;
  const FullyShardedDataParallelOptions& options_;
  FsdpStats& stats_;
  JoinLeader& join_leader_;
  std::function<void()> recover_;
  sharding::GradientWire shard_wire_, replica_wire_;
  sharding::LocalNorms norms_;
  std::deque<std::shared_ptr<Reduction>> open_;
  std::vector<std::shared_ptr<Reduction>> failed_;     // the ranks diverged before them
  HostSums on_the_way_;                                // of finished reductions
  std::vector<std::shared_ptr<Reduction>> unsettled_;  // which wait for on_the_way_
  comm::CommStream stream_;
  sharding::CallbackGuard callback_guard_;  // for the callbacks of open reductions
};

}  // namespace tessera::fsdp
