#pragma once

#include "fsdp/gradients.h"
#include "fsdp/join/join_leader.h"
#include "fsdp/residency.h"
#include "fsdp/unit_pages.h"
#include "sharding/gradients/forward_writes.h"
#include "sharding/module_buffers.h"

namespace tessera::fsdp {

/// A module whose parameters are sharded: the implementation of FullyShardedDataParallel.
class ShardedModule : public std::enable_shared_from_this<ShardedModule> {
 public:
  ShardedModule(torch::nn::Module& module, ProcessGroup group,
                FullyShardedDataParallelOptions options);
  ~ShardedModule();

  void begin_forward();
  void end_forward(bool threw);
  /// Begins a call that is allowed outside of forward and backward only. Replaced shards get their
  /// own memory again.
  void require_idle(const char* call);
  /// Registers for the gradients of the trainable parameters.
  void watch();
  bool full_precision() const { return full_precision_; }
  GradNorm clip(double max_norm, double norm_type);
  void clip_value(double clip_value);
  std::string prefix() const;  ///< "FullyShardedDataParallel: rank 2"
  void shadow_backward();
  void shadow_step();
  void finish_join(int last_active_rank);

  torch::nn::Module& module;
  FullyShardedDataParallelOptions options;
  ShardedModel model;
  FsdpStats stats;
  JoinLeader join_leader;
  std::function<void()> step_of_shadow;  ///< Set by set_shadow_step().
  sharding::ModuleBuffers buffers;
  std::unique_ptr<Residency> residency;
  std::unique_ptr<Gradients> gradients;
  std::unique_ptr<UnitPages> pages;
  /// Within summon_full_params(), one for each flat parameter: the whole values, if it has gathered
  /// them. Otherwise empty.
  std::vector<at::Tensor> summoned;

 private:
  /// Flat parameters with parameters that were frozen and require a gradient now are reduced from
  /// now on. All ranks must see it. Collective if there are some.
  void follow_thaw();
  /// `has_data`: false on a rank without data in a join.
  void end_backward(bool has_data);
  /// Switches between the dtypes of mixed_precision and the parameters' own. A change releases all
  /// units. Outside of forward. Local.
  void set_full_precision(bool full);
  /// `since`: "construction" or "the beginning of forward". UsageError on all ranks through
  /// ProcessGroup::fail().
  void check_parameters_unchanged(const char* since, const char* expected);

  bool autocast_cache_ = true;  // the caller's setting, restored after forward
  bool trimmed_ = false;        // freed memory was returned after the first backward
  bool full_precision_ = false;
  sharding::ForwardWrites writes_;  // to parameters that are whole on several ranks
};

}  // namespace tessera::fsdp
