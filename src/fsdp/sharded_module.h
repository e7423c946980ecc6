#pragma once

#include <set>

#include "fsdp/gradients.h"
#include "fsdp/join_leader.h"
#include "fsdp/paging/residency.h"
#include "sharding/gradients/backward_watch.h"

namespace tessera::fsdp {

/// A model that is sharded. Files: core.cpp (construction, forward and backward), build.cpp (the
/// model dealt out), precision.cpp (in which dtype it runs), shadow.cpp (in a join), norm.cpp,
/// full_params.cpp, state.cpp (and sharded_state.cpp, optim_state.cpp).
class ShardedModule : public std::enable_shared_from_this<ShardedModule> {
 public:
  static constexpr const char* kName = "FullyShardedDataParallel";

  ShardedModule(torch::nn::Module& module, ProcessGroup group,
                FullyShardedDataParallelOptions options);
  ~ShardedModule();

  // core.cpp
  void begin_forward();
  void end_forward(bool threw);
  void require_idle(const char* call) const;
  void watch();
  void end_backward();

  // build.cpp
  static ShardedModel build(torch::nn::Module& module, ProcessGroup group,
                            const FullyShardedDataParallelOptions& options);
  void make_pages();
  /// The page and the slots of flat `f`, for the dtype that it computes in.
  void make_page(size_t f);
  /// The members of `flat` are windows of its page again.
  void restore(const FlatParameter& flat);
  /// Member `m` is. Under NoDetection.
  void restore(const FlatParameter& flat, size_t m);
  std::vector<FsdpUnit> units() const;

  // precision.cpp
  /// Whether the model runs in the shards' dtypes although mixed_precision says others. Outside of
  /// forward. Units are released when it changes. Local.
  void set_full_precision(bool full);
  bool full_precision() const { return full_precision_; }

  // shadow.cpp
  void shadow_backward();
  void shadow_step();
  void finish_join(int last_active_rank);

  // norm.cpp
  double grad_norm(double norm_type);
  double clip(double max_norm, double norm_type);

  // full_params.cpp
  void summon(const std::vector<size_t>& units, bool keep);
  void dismiss(const std::vector<size_t>& units, bool writeback);
  std::vector<size_t> units_under(const std::string& prefix) const;

  // state.cpp
  /// Parameter `index`, whole, in its shape, on the CPU of rank `to` of the world (all for to < 0);
  /// undefined elsewhere. Collective.
  at::Tensor whole(size_t index, int to);
  /// Own shard out of a tensor of the parameter's shape.
  void take_shard(size_t index, const at::Tensor& whole);
  std::vector<const sharding::OwnedShard*> shards() const;

  std::string prefix() const;  ///< "FullyShardedDataParallel: rank 2"

  torch::nn::Module& module;
  FullyShardedDataParallelOptions options;
  ParameterDetection detection;
  ShardedModel model;
  FsdpStats stats;
  JoinLeader join_leader;
  std::function<void()> step_of_shadow;  ///< What set_shadow_step() was given.
  std::unique_ptr<Gradients> gradients;
  std::unique_ptr<Residency> residency;
  std::set<size_t> summoned;  ///< Units that are whole at the moment.

 private:
  std::vector<std::unique_ptr<SlotPool>> pools_;
  std::vector<size_t> trainable_;  // in the order of the watch
  std::unique_ptr<sharding::BackwardWatch> watch_;
  bool autocast_cache_ = true;
  bool trimmed_ = false;
  bool full_precision_ = false;

  SlotPool* pool(const FlatParameter& flat, at::TensorOptions (FlatParameter::*options_of)() const,
                 bool for_gradients);
  struct PoolKey {
    at::ScalarType dtype;
    at::Device device;
    bool root, gradients;
    bool operator==(const PoolKey&) const = default;
  };
  std::vector<PoolKey> pool_keys_;
  std::vector<at::Tensor> whole_;   // while summoned: one a flat
  std::vector<at::Tensor> shapes_;  // of the parameters, without memory
};

}  // namespace tessera::fsdp
