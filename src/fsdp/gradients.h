#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <mutex>

#include "comm/base/comm_stream.h"
#include "fsdp/host_sums.h"
#include "fsdp/join_leader.h"
#include "fsdp/sharded_model.h"
#include "sharding/callback_guard.h"
#include "sharding/detection/gradient_placeholders.h"
#include "sharding/detection/local_norms.h"
#include "sharding/gradients/arrival_tracker.h"
#include "sharding/gradients/gradient_placement.h"
#include "sharding/gradients/gradient_wire.h"

namespace tessera::fsdp {

/// Collects and reduces the gradients of a backward. Each gradient is computed in the flat buffer
/// of its unit or, where that was not predicted, copied to it when it arrives. When the last
/// expected gradient has arrived, the buffer is reduced to the gradients of the shards and is free
/// again. The expected gradients are those that arrived in the last backward that reduced.
/// Gradients that arrive after the reduction, or without the rest of the expected ones, are reduced
/// at the end of backward.
class Gradients {
 public:
  struct Callbacks {
    /// All gradients of a unit have arrived and will now be copied to its flat buffer. Called only
    /// for units with Pending::defer_until_complete.
    std::function<void(size_t unit)> complete;
    /// The reduction of a unit's gradients has begun.
    std::function<void(size_t unit)> reduced;
  };
  /// `wire`: of gradients between hosts. Collective.
  Gradients(ShardedModel& model, FsdpStats& stats, JoinLeader& join_leader, WireFormat wire,
            Callbacks callbacks);

  void hold_sync(int change) { holds_ += change; }
  bool sync() const { return leader_sync_.value_or(holds_ == 0); }
  /// On a rank without data in a join: the leader's setting counts; nullopt: this rank's own.
  void follow_sync(std::optional<bool> leader) { leader_sync_ = leader; }

  /// A forward begins. `trains`: a backward may follow which reduces.
  void begin_forward(bool trains);
  /// A backward has begun; autograd has not yet changed any `.grad`.
  void begin_backward();
  /// Autograd has set `.grad` of a parameter of the module. `computed` is the tensor that autograd
  /// stored there.
  void arrived(size_t parameter, const at::Tensor& computed);
  /// At the end of backward: reduces the remaining gradients and waits for all reductions; then
  /// `.grad` of the shards is up to date. Under no_sync it keeps the gradients.
  /// False: nothing was reduced, because of no_sync() or because the pass was an autograd::grad()
  /// of other tensors.
  bool finish();
  /// For a backward that was abandoned: drops its gradients, also those of open reductions.
  void abandon();
  /// Clears the gradients of the shards and those kept by no_sync. Outside of backward.
  void zero_grad(bool set_to_none);
  /// Clears those of the parameters whose `.grad` the program has reset since the last backward:
  /// see [Note: placeholders of gradients]. Outside of backward.
  void notice_cleared();

  /// See sharding::GradientWire. Outside of backward.
  void end_wire_step(StepEnd end) {
    for (auto* wire : {&shard_wire_, &replica_wire_}) {
      wire->end_step(end.used);
      wire->rescale(end.scale);
    }
  }
  /// Blocks until the gradients of the shards have arrived.
  void wait() {}

  // On a rank without data: the same actions as on ranks with data. It contributes zeros, and the
  // gradients that it has accumulated itself under no_sync.
  void shadow_gradient(size_t flat);
  void shadow_reduce(const GradientsReduced& event);

  int64_t shard_bytes() const;

 private:
  struct Pending {
    at::Tensor flat;                // a slot; undefined while it holds no gradient
    std::vector<at::Tensor> views;  // one for each member
    std::vector<char> has;          // members whose gradient arrived since the last reduction
    std::vector<char> placed;       // members whose gradient was computed there in this backward
    bool early = false;             // it was taken before the first gradient has arrived
    /// One parameter is more than half of it. If that parameter is tied, autograd keeps its first
    /// gradient until it has the second. The flat buffer is then filled only when all gradients
    /// have arrived; otherwise the same gradient would be in memory three times.
    bool defer_until_complete = false;
    bool reduced = false;    // in this backward
    at::Tensor own_segment;  // this rank's part of the mean
    /// The same memory, of which the shards' gradients are views; null where they are not watched:
    /// see [Note: norms of one rank].
    std::unique_ptr<sharding::Page> page;
  };
  struct EndOfBackward;
  struct Reduction {
    size_t flat;
    Work work;
    at::Tensor slot;
    at::Tensor part;  // with replicas: the sum over the shard group, then summed over the replicas
    std::vector<char> used;  // members that have a gradient
    std::vector<char> adds;  // members whose shard already has a gradient, so the sum is added
    std::vector<at::Tensor> before;  // the same for shards with hooks, whose sum must stay apart
    bool settled = false;
    double scale = 1;
    HostSums on_the_way;                // with cpu_offload
    std::atomic<bool> dropped = false;  // its backward was abandoned, so the result is not used
    comm::CommStream::Mark mark;
  };

  void refuse_set_gradients();
  void notice();
  void show_placeholders();
  void zero(size_t parameter);
  void begin(size_t flat);
  void take(size_t flat, size_t member, const at::Tensor& computed);
  void take_all(size_t flat, size_t arrived, const at::Tensor& computed);
  bool may_move(size_t flat, size_t parameter, const at::Tensor& grad,
                const at::Tensor& computed) const;
  bool has_window(size_t flat, size_t member) const;
  void begin_next(size_t flat);
  void displace(size_t flat);
  void forget(size_t flat);
  void drop_early();
  at::Tensor& gradient_of(size_t flat, size_t member) const;
  void drop();
  void drop(size_t flat);
  void reduce(size_t flat);
  bool is_large(size_t flat) const;
  bool only_large_parameters_are_left() const;
  size_t small_ones_left() const;
  void return_free_memory(size_t flat);
  void return_cleared();
  void reduce_rest();
  bool take_reduced();
  void finish_one();
  void settle(Reduction& reduction);
  void add(Reduction& reduction, int64_t offset, const at::Tensor& sum);
  void wait_for_host_sums();
  at::Tensor window(size_t flat, size_t member) const;
  at::Tensor shard_gradient(size_t flat, size_t member) const;
  std::set<sharding::LocalNorms::Gradient> shard_gradients() const;
  [[noreturn]] void refuse_own_norms() const;

  ShardedModel& model_;
  sharding::GradientWire shard_wire_, replica_wire_;
  const size_t max_open_;  // reductions at the same time
  FsdpStats& stats_;
  JoinLeader& join_leader_;
  Callbacks callbacks_;
  sharding::GradientPlaceholders placeholders_;
  sharding::LocalNorms norms_;
  sharding::GradientPlacement placement_;
  std::vector<Pending> pending_;  // by flat parameter
  bool has_large_ = false;        // see [Note: large parameters]
  // The flat parameters in the order of their reductions: in this backward, and in the last that
  // reduced.
  std::vector<size_t> order_, last_order_;
  std::optional<size_t> early_;       // the last flat parameter that got its buffer early
  sharding::ArrivalTracker tracker_;  // its groups are the flat parameters
  std::deque<std::shared_ptr<Reduction>> open_;
  HostSums on_the_way_;                                // of finished reductions
  std::vector<std::shared_ptr<Reduction>> unsettled_;  // which wait for on_the_way_
  comm::CommStream stream_;
  uint64_t forwards_ = 0, backwards_ = 0;  // that are not under no_sync()
  int holds_ = 0;                          // scopes of no_sync()
  std::optional<bool> leader_sync_;
  std::mutex mutex_;
  sharding::CallbackGuard callback_guard_;  // for the callbacks of open reductions
};

}  // namespace tessera::fsdp
