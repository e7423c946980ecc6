#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <mutex>

#include "fsdp/comm_stream.h"
#include "fsdp/join_leader.h"
#include "fsdp/sharded_model.h"
#include "sharding/callback_guard.h"

namespace tessera::fsdp {

/// Gradients of a backward: into a flat buffer of their unit as they arrive, from there, when the
/// last one that is expected has come, to the shards, and the buffer is free again. Expected is
/// what came in the last backward that reduced; what comes later than that, or alone, is reduced at
/// the end.
class Gradients {
 public:
  struct Callbacks {
    std::function<void(size_t unit)> complete;  ///< All of a unit's gradients are there, about to
                                                ///< be put together. Not of every unit.
    std::function<void(size_t unit)> reduced;   ///< They were given away.
  };
  Gradients(ShardedModel& model, FsdpStats& stats, JoinLeader& join_leader, Callbacks callbacks);

  void set_sync(bool sync) { sync_ = sync; }
  bool sync() const { return sync_; }

  /// `.grad` of a parameter of the module has arrived.
  void arrived(size_t parameter);
  /// Backward is over: reduces what is left and waits; `.grad` of the shards are then current.
  /// Under no_sync only keeps.
  void finish();
  /// Backward was given up: what it has not reduced yet is dropped, and what is being reduced.
  void abandon();
  /// Outside of backward: of the shards, and what is kept unreduced.
  void zero_grad(bool set_to_none);

  // What others do, on a rank without data: zeros, and what it has accumulated itself.
  void shadow_gradient(size_t flat);
  void shadow_reduce(const std::vector<int64_t>& flat_and_used);

  int64_t shard_bytes() const;

 private:
  struct Pending {
    at::Tensor flat;                // a slot; undefined when nothing has arrived
    std::vector<at::Tensor> views;  // one a member
    std::vector<char> has;          // since the last reduction
    std::vector<char> came;         // in this backward
    size_t arrived = 0;             // of those that are expected, in this backward
    std::vector<char> expected;
    size_t expecting = 0;
    /// Most of it is one parameter. If that one is tied, autograd keeps its first gradient until it
    /// has the second: the buffer waits until all are there, or the same gradient would be in
    /// memory three times.
    bool defer_until_complete = false;
    bool reduced = false;    // in this backward
    at::Tensor own_segment;  // the mean, own segment
  };
  struct Reduction {
    size_t flat;
    Work work;
    at::Tensor slot;
    at::Tensor part;  // of a replicated shard: summed over replicas before it is added
    std::vector<char> used, adds;
    double scale = 1;
    std::atomic<bool> dropped = false;  // its backward was given up: it is waited for, and no more
    CommStream::Mark mark;
  };

  void begin(size_t flat);
  void take(size_t flat, size_t member);
  void take_all(size_t flat);
  at::Tensor& gradient_of(size_t flat, size_t member) const;
  void forget_arrivals();
  void drop();
  void reduce(size_t flat);
  bool is_large(size_t flat) const;
  bool only_large_parameters_are_left() const;
  void finish_one();
  void add(const Reduction& reduction, int64_t offset, const at::Tensor& run);
  at::Tensor window(size_t flat, size_t member) const;

  ShardedModel& model_;
  FsdpStats& stats_;
  JoinLeader& join_leader_;
  Callbacks callbacks_;
  std::vector<Pending> pending_;
  std::deque<std::shared_ptr<Reduction>> open_;
  CommStream stream_;
  bool sync_ = true;
  std::recursive_mutex mutex_;
  sharding::CallbackGuard callback_guard_;  // of the reductions that are open
};

}  // namespace tessera::fsdp
