#pragma once

#include "fsdp/gradient_buffers.h"
#include "fsdp/join/join_leader.h"
#include "fsdp/reductions.h"
#include "fsdp/residency.h"
#include "fsdp/shard_placeholders.h"
#include "sharding/gradients/arrival_tracker.h"

namespace tessera::fsdp {

/// Collects the gradients of a backward in flat buffers and has them reduced. When the last
/// expected gradient has arrived, the buffer is reduced to the gradients of the shards and is free
/// again. The expected gradients are those that arrived in the last backward that reduced.
/// Gradients that arrive after the reduction, or without the rest of the expected ones, are reduced
/// at the end of backward.
class Gradients {
 public:
  /// Collective.
  Gradients(ShardedModel& model, const FullyShardedDataParallelOptions& options, FsdpStats& stats,
            JoinLeader& join_leader, Residency& residency);

  void hold_sync(int change) { holds_ += change; }
  /// On a rank without data in a join: the leader's setting counts; nullopt: this rank's own.
  void follow_sync(std::optional<bool> leader) { leader_sync_ = leader; }

  /// A forward begins. `trains`: a backward that reduces may follow.
  void begin_forward(bool trains);
  /// A backward has begun; autograd has not yet changed any `.grad`.
  void begin_backward();
  /// Autograd has set `.grad` of a parameter of the module. `computed` is the tensor that autograd
  /// stored there.
  void arrived(size_t parameter, const at::Tensor& computed);
  /// At the end of backward: reduces the remaining gradients. Then `.grad` of the shards is up to
  /// date, or see [Note: late gradients]. Under no_sync it keeps the gradients.
  /// False: nothing was reduced, because of no_sync() or because the pass was an autograd::grad()
  /// of other tensors.
  bool end_backward();
  /// After end_backward(), if the ranks have diverged at the end of it: the same once more.
  bool end_diverged_backward();
  /// For a backward that was abandoned: drops its gradients, also those of open reductions.
  void abandon();
  /// Clears the gradients of parameters whose `.grad` the program has reset since the last
  /// backward: see [Note: placeholders of gradients]. Outside of backward.
  void notice_cleared();
  /// Waits for late gradients.
  void wait();
  /// Clears the gradients of the shards and those kept by no_sync. Outside of backward.
  void zero_grad(bool set_to_none);
  /// Outside of backward.
  void end_step(StepEnd end) { reductions_.end_step(end); }

  // On a rank without data: the same actions as on ranks with data. It contributes zeros, and the
  // gradients that it has accumulated itself under no_sync.
  void shadow_gradient(size_t flat);
  void shadow_reduce(const GradientsReduced& event);

 private:
  bool sync() const { return leader_sync_.value_or(holds_ == 0); }
  void begin(FlatParameter& flat);
  void begin_next(const FlatParameter& flat);
  void take(FlatParameter& flat, size_t member, const at::Tensor& computed);
  void take_all(FlatParameter& flat, size_t arrived, const at::Tensor& computed);
  void drop_early();
  void reduce(FlatParameter& flat);
  void reduce_in_order();
  bool reduce_rest();
  template <class Action>
  void evenly(Action&& action);

  ShardedModel& model_;
  JoinLeader& join_leader_;
  Residency& residency_;
  GradientBuffers buffers_;
  Reductions reductions_;
  ShardPlaceholders placeholders_;
  const bool has_large_;              // see [Note: large parameters]
  sharding::ArrivalTracker tracker_;  // its groups are the flat parameters
  // The flat parameters in the order of their reductions: in this backward, and in the last that
  // reduced.
  std::vector<FlatParameter*> order_, last_order_;
  FlatParameter* early_ = nullptr;         // the last that got its buffer early
  uint64_t forwards_ = 0, backwards_ = 0;  // that are not under no_sync()
  int holds_ = 0;                          // scopes of no_sync()
  std::optional<bool> leader_sync_;
};

}  // namespace tessera::fsdp
