#pragma once

#include <set>

#include "fsdp/gradients.h"
#include "fsdp/join_leader.h"
#include "fsdp/residency.h"
#include "sharding/gradients/backward_watch.h"
#include "sharding/gradients/forward_writes.h"
#include "sharding/module_buffers.h"

namespace tessera::fsdp {

/// A module whose parameters are sharded: the implementation of FullyShardedDataParallel. The
/// comments below name the file of each group of functions.
class ShardedModule : public std::enable_shared_from_this<ShardedModule> {
 public:
  ShardedModule(torch::nn::Module& module, ProcessGroup group,
                FullyShardedDataParallelOptions options);
  ~ShardedModule();

  // sharded_module.cpp
  void begin_forward();
  void end_forward(bool threw);
  /// Begins a call that is allowed outside of forward and backward only. Replaced shards get their
  /// own memory again.
  void require_idle(const char* call);
  /// Registers for the gradients of the trainable parameters.
  void watch();
  void end_backward();
  /// Switches between the dtypes of mixed_precision and the parameters' own. A change releases all
  /// units. Outside of forward. Local.
  void set_full_precision(bool full);
  bool full_precision() const { return full_precision_; }
  GradNorm clip(double max_norm, double norm_type);
  std::string prefix() const;  ///< "FullyShardedDataParallel: rank 2"

  // sharded_module_pages.cpp
  void make_pages();
  /// Makes the page of flat parameter `f` for its present compute dtype, and the pool of its slots.
  void make_page(size_t f);
  /// With cpu_offload: operators on the shards of `f` wait until the device has read them.
  void watch_shards(size_t f);
  /// Makes the members of `flat` views of its page again.
  void restore(const FlatParameter& flat);
  /// The same for member `m`. The caller must hold a NoDetection.
  void restore(const FlatParameter& flat, size_t m);
  std::vector<FsdpUnit> units() const;

  // sharded_module_join.cpp
  void shadow_backward();
  void shadow_step();
  void finish_join(int last_active_rank);

  // state/full_params.cpp
  void summon(const std::vector<size_t>& units, bool keep);
  /// Copies the whole values of `units` to the shards. UsageError on all ranks, with nothing
  /// copied, if a parameter of one rank has another shape than before. Collective.
  void write_back(const std::vector<size_t>& units);
  /// Frees the whole values of `units`. Local.
  void dismiss(const std::vector<size_t>& units);
  std::vector<size_t> units_under(const std::string& prefix) const;

  // state/state_dict.cpp
  /// Parameter `index`, whole, in its shape, on the CPU of world rank `to` (on all ranks if to <
  /// 0); undefined on the others. Collective.
  at::Tensor whole(size_t index, int to);
  /// Copies this rank's shard from a tensor of the parameter's shape. Local.
  void take_shard(size_t index, const at::Tensor& whole);
  std::vector<const sharding::OwnedShard*> shards() const;

  torch::nn::Module& module;
  FullyShardedDataParallelOptions options;
  ShardedModel model;
  FsdpStats stats;
  JoinLeader join_leader;
  std::function<void()> step_of_shadow;  ///< Set by set_shadow_step().
  sharding::ModuleBuffers buffers;
  std::unique_ptr<Gradients> gradients;
  std::unique_ptr<Residency> residency;
  std::set<size_t> summoned;  ///< Units that summon_full_params() has gathered.

 private:
  std::vector<std::unique_ptr<SlotPool>> pools_;
  std::vector<size_t> trainable_;  // parameter indices, in the order of watch_
  std::unique_ptr<sharding::BackwardWatch> watch_;
  bool autocast_cache_ = true;  // the caller's setting, restored after forward
  bool trimmed_ = false;        // freed memory was returned after the first backward
  bool full_precision_ = false;
  bool has_data_ = true;            // false while this rank takes part in a join without data
  sharding::ForwardWrites writes_;  // to parameters that are whole on several ranks

  /// A parameter that was replaced while it was whole.
  struct Replaced {
    at::Tensor window;  // its place among the whole values, in its shape and strides
    at::Tensor now;
  };
  std::vector<Replaced> replaced(const std::vector<size_t>& units);
  /// `since`: "construction" or "the beginning of forward". UsageError on all ranks through
  /// ProcessGroup::fail().
  void check_parameters_unchanged(const char* since, const char* expected);
  SlotPool* pool(const FlatParameter& flat, at::TensorOptions (FlatParameter::*options_of)() const,
                 bool for_gradients);
  struct PoolKey {
    at::ScalarType dtype;
    at::Device device;
    bool root, gradients;
    bool operator==(const PoolKey&) const = default;
  };
  std::vector<PoolKey> pool_keys_;
  std::vector<at::Tensor> whole_;   // while summoned: one for each flat parameter
  std::vector<at::Tensor> shapes_;  // of the parameters, without memory
};

}  // namespace tessera::fsdp
