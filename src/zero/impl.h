#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sharding/callback_guard.h"
#include "sharding/gradients/reducer.h"
#include "tessera/optim/fused_optimizer.h"
#include "tessera/zero_redundancy_optimizer.h"
#include "zero/shard_bucket.h"

namespace tessera {

/// Parameters, their shards, the local optimizer over own shards, and what moves between ranks.
/// Files: construction.cpp (what is where), update.cpp (a step, norms), state.cpp (state dicts),
/// shards.cpp.
class ZeroRedundancyOptimizer::Impl {
 public:
  static constexpr const char* kName = "ZeroRedundancyOptimizer";

  Impl(ZeroRedundancyOptimizer& outer, ProcessGroup group, OptimizerFactory factory,
       Options options);

  // construction.cpp
  using ShardBucket = zero::ShardBucket;

  static std::unique_ptr<torch::optim::OptimizerOptions> default_options(
      const OptimizerFactory& factory);
  void add_group(Group group);
  void finish_construction();
  void repartition_if_trainability_changed();

  // update.cpp
  at::Tensor step(const LossClosure& closure);
  void zero_grad(bool set_to_none);
  void shadow_backward();
  double grad_norm(double norm_type);
  double clip(double max_norm, double norm_type);
  void clip_value(double clip_value);

  // shards.cpp
  void require_settled(const char* call) const;

  // state.cpp
  std::vector<OptimizerStateDict::Group> groups() const;
  OptimizerStateDict gather_state(int to);
  void load(const OptimizerStateDict& dict);
  std::vector<const sharding::OwnedShard*> owned_shards() const;
  Memory memory() const;

  std::string prefix() const;  ///< "ZeroRedundancyOptimizer: rank 2"
  std::vector<size_t> trainable_subset() const;
  void make_shard_buckets(const std::vector<size_t>& subset);
  void extend_local_optimizer();
  void rebuild_reducer();

  /// One bucket's update while its reduction goes on.
  struct PendingUpdate;
  void copy_options(bool inwards);
  void check_options_since_backward();
  void check_storage();
  bool one_pass(const ShardBucket& bucket) const;
  bool used(size_t parameter) const;
  void finish_reduction();
  void send_bucket(size_t index);
  void consume(PendingUpdate& update, int64_t offset, const at::Tensor& run);
  at::Tensor own_segment(ShardBucket& bucket);
  void reduce(size_t index, bool update_directly);
  void take_gradients_of_caller(ShardBucket& bucket);
  void ensure_reduced();
  void check_reduced_is_current() const;
  void hand_out_gradients(ShardBucket& bucket, const std::function<bool(size_t)>& is_used);
  void take_back_gradients(ShardBucket& bucket);
  void gather_all();
  void bump_versions();
  at::Tensor step_with_closure(const LossClosure& closure);

  ZeroRedundancyOptimizer& outer_;
  ProcessGroup group_;
  OptimizerFactory factory_;
  Options options_;
  bool element_wise_ = false;

  std::vector<sharding::NamedTensor>
      parameters_;  ///< Over all groups, in order; those that are frozen too.
  std::vector<size_t> group_of_;
  std::vector<char> trainable_;  ///< As when the shards were made.
  std::vector<int64_t> load_;
  std::map<size_t, const void*> placed_at_;  ///< Where each sharded parameter's memory begins.
  std::vector<ShardBucket> buckets_;
  std::unique_ptr<torch::optim::Optimizer> local_;
  std::unique_ptr<sharding::Reducer> reducer_;

  std::vector<size_t> position_;  ///< Of a parameter in the reducer's list.

  bool reduced_ = false;  ///< `reduced` of every bucket holds this step's average.
  uint64_t reduced_generation_ = 0;
  int divisor_;               ///< Of the mean: the world size, or what a join says.
  bool want_shards_ = false;  ///< The reduction under way is to fill `reduced`, not to update.
  bool track_norm_ = false;
  bool trimmed_ = false;
  double norm_squares_ = 0, last_norm_ = 0;
  std::vector<Work> sent_;            ///< Overlap: what step() waits for …
  std::vector<OptionMap> sent_with_;  ///< … and each group's options when backward began to send.
  std::optional<OptimizerStateDict> consolidated_;
  std::map<std::string, ParamState>
      parked_;  ///< State of parameters that were frozen after they had been stepped; on all ranks.
  sharding::CallbackGuard callback_guard_;  ///< Overlap: of the updates behind reductions.
};

}  // namespace tessera
