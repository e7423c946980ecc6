#pragma once

#include <functional>
#include <map>
#include <mutex>

#include "comm/base/comm_stream.h"
#include "fsdp/join_leader.h"
#include "fsdp/paging/use_order.h"
#include "fsdp/sharded_model.h"

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
/// [Note: shards on the host] With cpu_offload the device reads the shards later than it is told
/// to. The host waits for it before shards may change: where a forward without gradients ends,
/// where a backward that reduces ends (there Gradients has waited, as a rule), and in
/// release_all(). A forward with gradients does not wait, because its backward usually comes before
/// the shards change. If it does not, the first operator that takes a shard waits: the shards are
/// on pages of host_shards().
class Residency : public sharding::PageOwner {
 public:
  /// `in_backward`: called when an operator of a backward first uses a page.
  Residency(ShardedModel& model, const FullyShardedDataParallelOptions& options, FsdpStats& stats,
            JoinLeader& join_leader, std::function<void()> in_backward);

  void need(c10::ArrayRef<sharding::PageUse> uses, std::string_view op) override;
  void failed(const sharding::PageUse& use, std::string_view op,
              const c10::Error& error) const override;

  /// `full_precision`: sent to ranks without data.
  void begin_forward(bool full_precision);
  /// `step_over`: whether no backward can follow.
  void end_forward(bool step_over);
  /// For a forward that threw. Does not wait for other ranks.
  void abandon_forward(bool step_over);
  /// The current backward has ended or was abandoned: none of its operators will follow.
  void leave_backward() { backward_ = false; }
  void end_backward();
  /// All gradients of `unit` have arrived and need memory.
  void gradients_complete(size_t unit);
  /// The reduction of the gradients of `unit` has begun.
  void gradients_done(size_t unit);
  /// Releases all units, because the shards have changed or will change.
  void release_all();
  bool running() const { return forwards_ > 0; }
  bool nested() const { return forwards_ > 1; }  ///< A forward within a forward.

  /// The owner of pages of shards on the host.
  sharding::PageOwner& host_shards() { return host_shards_; }

  // On a rank without data: the same actions as on ranks with data.
  void shadow_begin_forward();
  void shadow_end_forward();
  void shadow_use(const UnitsUsed& event);

 private:
  class HostShards : public sharding::PageOwner {
   public:
    explicit HostShards(Residency& residency) : residency_(residency) {}
    void need(c10::ArrayRef<sharding::PageUse> uses, std::string_view op) override;

   private:
    Residency& residency_;
  };
  enum class State : uint8_t { released, gathering, resident };
  struct Gathered {
    State state = State::released;
    std::vector<at::Tensor> memory;  // one for each flat parameter that is gathered
    std::vector<Work> work;
    comm::CommStream::Mark mark;
    bool changed = false;   // the optimizer will change the shards, or has changed them
    bool reduced = false;   // its gradients were reduced, and are not cleared yet
    uint64_t versions = 0;  // of the shards when the unit was gathered
    uint64_t last_use = 0;
  };

  void refuse_outside(const sharding::PageUse& use, std::string_view op) const;
  void refuse_idle(const sharding::PageUse& use, std::string_view op) const;
  void refuse_write(const sharding::PageUse& use, std::string_view op) const;
  std::string describe(const sharding::PageUse& use) const;
  void begin_phase(Phase phase);
  void use(Phase phase);
  void fetch(size_t unit, Phase phase, bool prefetch);
  void finish(size_t unit);
  void release(size_t unit);
  bool contains_needed(size_t unit, const std::vector<size_t>& needed) const;
  bool release_until_it_fits(int64_t bytes, const std::vector<size_t>& needed, size_t min_distance);
  void prefetch_next(Phase phase);
  bool prefetch(size_t unit, Phase phase, size_t distance);
  void synchronize_changes();
  void note_versions();
  void refuse_stale_graph();
  void end_step();
  void wait_for_readers(const char* tag);
  void wait_for_copies();
  uint64_t versions(size_t unit) const;
  bool has_gradients(size_t unit) const;
  int64_t budget() const;

  ShardedModel& model_;
  const FullyShardedDataParallelOptions& options_;
  FsdpStats& stats_;
  JoinLeader& join_leader_;
  std::function<void()> in_backward_;
  std::mutex mutex_;
  HostShards host_shards_{*this};
  std::vector<Gathered> gathered_;
  UseOrder order_;
  comm::CommStream stream_;
  comm::CommStream::Mark copied_;  // the last copy from a shard on the host; null: none is pending
  std::vector<size_t> needed_;     // units that the current operator uses
  std::vector<uint64_t> forward_versions_;  // of each unit's shards at the last forward
  std::vector<int> changed_;                // for each unit, whether it must be released
  int64_t resident_bytes_ = 0;              // gathered units except the root
  uint64_t clock_ = 0;
  Phase phase_ = Phase::forward;  // of the last use
  size_t turn_ = 0;               // gathers in this phase: see [Note: lanes]
  size_t look_ahead_ = 1;         // units that are gathered before their use
  int forwards_ = 0;
  bool backward_ = false;  // a backward runs and has used a page
  bool reduced_ = false;   // the backward has reduced gradients
  // Whether ranks without data take part in the current forward; they skip forwards without
  // gradients.
  bool followed_ = false;
  bool unlimited_ = false, keeps_unchanged_ = false, shares_memory_ = false;
  bool crosses_hosts_ = false;  // gathers take as long as the wire needs
};

}  // namespace tessera::fsdp
