#pragma once

#include <algorithm>
#include <atomic>

#include "comm/base/comm_stream.h"
#include "fsdp/host_copies.h"
#include "fsdp/join/join_leader.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/paging/use_order.h"

namespace tessera::fsdp {

/// Decides which units are gathered. When an operator needs a unit that is not gathered, the unit
/// is gathered and others are released to stay within the budget. Units that the same operator
/// needs and the root are not released; the root stays until the step is over.
///
/// [Note: step] A step begins with a forward and ends with the end of a backward, or of a forward
/// without gradients. Sharded parameters can be used only within a step: in the thread that runs
/// forward, and in backward. The order of use in one step predicts the order in the next.
///
/// [Note: shards in common memory] If the shards of all ranks are in one common memory, an
/// all-gather is only a barrier: after it this rank sees what the others have written before it. A
/// second barrier at the end of every forward and backward guarantees that no rank overwrites
/// parameters that another rank still reads: all ranks have then finished with the parameters, and
/// shards are written only outside of forward and backward.
///
/// [Note: divergence] Ranks may use different units, or different parameters of one unit (experts,
/// branches). Then a rank's collective differs from another rank's, in kind or tag, and
/// comm::Diverged is thrown on all ranks. No message is needed while nothing differs. From there to
/// the end of the step, the ranks do not depend on each other's path: they gather all units,
/// release none, and reduce all remaining gradients at the end of backward, in the order of the
/// units, after an exchange of which parameters have gradients. Memory that they need meanwhile is
/// no slot. The next step begins without a record of use. A rank that has not used all units makes
/// a barrier before it leaves a forward or backward, which meets what another rank still needs
/// there. With replicas, shard groups learn of each other's divergence when they reduce.
class Residency : public sharding::PageOwner {
 public:
  Residency(ShardedModel& model, const FullyShardedDataParallelOptions& options, FsdpStats& stats,
            JoinLeader& join_leader);

  void need(c10::ArrayRef<sharding::PageUse> uses, std::string_view op) override;
  void failed(const sharding::PageUse& use, std::string_view op,
              const c10::Error& error) const override;

  /// `full_precision`: whether this forward computes in the parameters' own dtype. Ranks without
  /// data receive it.
  void begin_forward(bool full_precision);
  /// `step_over`: whether no backward can follow.
  void end_forward(bool step_over);
  /// Called after a forward that threw. Does not wait for other ranks.
  void abandon_forward(bool step_over);
  /// The current backward has ended or was abandoned: none of its operators will follow.
  void leave_backward() { backward_ = false; }
  /// `reduced`: whether it has reduced gradients.
  void end_backward(bool reduced);
  /// All gradients of `unit` have arrived and need memory.
  void gradients_complete(Unit& unit);
  /// The reduction of the gradients of `unit` has begun.
  void gradients_done(Unit& unit);
  /// Releases all units, because the shards have changed or will change.
  void release_all();
  /// After comm::Diverged. Collective.
  void diverge();
  int forwards() const { return forwards_; }  ///< That run, one within another.
  /// The owner of pages of shards on the host.
  sharding::PageOwner& host_shards() { return copies_; }
  /// On a rank without data: the same as the operator on ranks with data.
  void shadow_use(const UnitsUsed& event);

 private:
  void use(Phase phase);
  void gather_needed(Phase phase);
  void fetch(Unit& unit, Phase phase, bool prefetch);
  void release(Unit& unit);
  bool release_until_it_fits(int64_t bytes, size_t min_distance);
  void prefetch_next(Phase phase);
  bool prefetch(Unit& unit, Phase phase, size_t distance);
  void synchronize_changes();
  void end_step();
  void wait_for_readers(const char* tag, bool meets = false);

  ShardedModel& model_;
  const FullyShardedDataParallelOptions& options_;
  FsdpStats& stats_;
  JoinLeader& join_leader_;
  UseOrder order_;
  comm::CommStream stream_;
  HostCopies copies_{stream_};
  std::vector<size_t> needed_;  // units that the current operator uses
  size_t look_ahead_;           // units that are gathered before their use
  uint64_t clock_ = 0;
  Phase phase_ = Phase::forward;  // of the last use
  size_t turn_ = 0;               // gathers in this phase: see [Note: lanes]
  std::atomic<int> forwards_ = 0;
  std::atomic<bool> backward_ = false;  // a backward runs and has used a page
  // True if ranks without data take part in the current forward; they skip forwards without
  // gradients.
  bool followed_ = false;
};

/// See [Note: divergence]. An accelerator does not wait for a comparison.
inline bool units_may_differ(const ShardedModel& model, const JoinLeader& join_leader) {
  return model.device().is_cpu() && !join_leader.some_rank_has_no_data();
}
inline bool may_diverge(const ShardedModel& model, const JoinLeader& join_leader) {
  return !model.diverged && units_may_differ(model, join_leader);
}

/// Whether another rank may gather a unit in this forward after this rank has left it. If no
/// backward follows, the gather would meet a collective of the program.
inline bool may_follow(const ShardedModel& model, bool step_over, bool gathered) {
  return (step_over && gathered) ||
         std::any_of(model.units.begin(), model.units.end(), [&](const Unit& unit) {
           return unit.state == Unit::State::released && unit.gathered_bytes() > 0 &&
                  (step_over || !unit.in_forward);
         });
}

}  // namespace tessera::fsdp
