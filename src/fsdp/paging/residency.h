#pragma once

#include <functional>
#include <map>
#include <mutex>

#include "fsdp/comm_stream.h"
#include "fsdp/join_leader.h"
#include "fsdp/paging/use_order.h"
#include "fsdp/sharded_model.h"

namespace tessera::fsdp {

/// Decides which units are gathered. A unit that an operator needs and that is not there is a
/// fault: it is gathered, and others are released to stay within the budget; never one that the
/// same operator needs, nor the root, which stays until the step is over.
///
/// [Note: a step] begins with a forward and ends with the end of a backward, or of a forward
/// without gradients. Between them, and only there, sharded parameters can be used: in the thread
/// that runs forward, and in backward. The order of use in one step is the forecast for the next.
///
/// [Note: shards in common] Where the ranks' shards are one memory, a gather is a meeting: what
/// peers wrote before it is there. That nobody writes what another rank still reads follows from
/// two more meetings: no rank leaves a forward or a backward before all have done with the
/// parameters in it, and shards are only written outside of both.
class Residency : public PageOwner {
 public:
  /// `in_backward`: called when an operator of a backward takes a page.
  Residency(ShardedModel& model, const FullyShardedDataParallelOptions& options, FsdpStats& stats,
            JoinLeader& join_leader, std::function<void()> in_backward);

  void need(c10::ArrayRef<PageUse> uses, std::string_view op) override;

  /// `full_precision`: for ranks without data.
  void begin_forward(bool full_precision);
  /// `step_over`: no backward can follow.
  void end_forward(bool step_over);
  /// The forward threw: no other rank is waited for.
  void abandon_forward(bool step_over);
  /// No operator of the backward under way comes any more, whether it ended or was given up.
  void leave_backward() { backward_ = false; }
  void end_backward();
  /// The gradients of `unit` are all there, and need room.
  void gradients_complete(size_t unit);
  /// They are on their way.
  void gradients_done(size_t unit);
  /// Lets go of everything: the shards have changed, or are about to.
  void release_all();
  bool running() const { return forwards_ > 0; }

  // What others do, on a rank without data.
  void shadow_forward();
  void shadow_forward_over();
  void shadow_use(const std::vector<int64_t>& phase_and_units);

 private:
  enum class State : uint8_t { released, gathering, resident };
  struct Gathered {
    State state = State::released;
    std::vector<at::Tensor> memory;  // one a flat
    std::vector<Work> work;
    CommStream::Mark mark;
    bool changed = false;  // its gradients were reduced since: the optimizer will change the shards
    uint64_t versions = 0;  // of the shards, when it was gathered
    uint64_t last_use = 0;
  };

  void refuse_outside(const PageUse& use, std::string_view op) const;
  void refuse_idle(const PageUse& use, std::string_view op) const;
  void refuse_write(const PageUse& use, std::string_view op) const;
  std::string describe(const PageUse& use) const;
  void use(Phase phase);
  void fetch(size_t unit, Phase phase, bool prefetch);
  void finish(size_t unit);
  void release(size_t unit);
  bool around_needed(size_t unit, const std::vector<size_t>& needed) const;
  bool release_until_it_fits(int64_t bytes, const std::vector<size_t>& needed, size_t nearer_than);
  void prefetch_next(Phase phase);
  void synchronize_changes();
  void end_step();
  void stop_reading(const char* when);
  uint64_t versions(size_t unit) const;
  int64_t budget() const;

  ShardedModel& model_;
  const FullyShardedDataParallelOptions& options_;
  FsdpStats& stats_;
  JoinLeader& join_leader_;
  std::function<void()> in_backward_;
  std::mutex mutex_;
  std::vector<Gathered> gathered_;
  UseOrder order_;
  CommStream stream_;
  std::vector<size_t> needed_;  // by the operator that runs
  std::vector<int> changed_;    // of each unit, whether it may not stay
  int64_t resident_bytes_ = 0;  // without the root
  uint64_t clock_ = 0;
  int forwards_ = 0;
  bool backward_ = false;  // one is under way, and has used a page
  bool followed_ =
      false;  // the forward under way: one without gradients is none that a rank without data is in
  bool unlimited_ = false, keeps_unchanged_ = false, shares_memory_ = false;
};

}  // namespace tessera::fsdp
