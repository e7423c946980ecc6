#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/optim.h"
#include "tessera/optim/fused_optimizer.h"
#include "zero/shards/shards.h"

namespace tessera::zero {

/// The wrapped optimizer. Its parameters are this rank's shards; its group i is group i of the
/// ZeroRedundancyOptimizer that users see. All members are local.
class LocalOptimizer {
 public:
  explicit LocalOptimizer(OptimizerFactory factory) : factory_(std::move(factory)) {}

  /// Makes the optimizer, or adds to it the groups of `visible` and the shards that it does not
  /// have yet.
  void extend(const torch::optim::Optimizer& visible, const Shards& shards);

  torch::optim::Optimizer& get() const { return *optimizer_; }
  /// True if elements are updated independently of each other, so that parameters can be cut.
  bool element_wise() const { return element_wise_; }
  /// The optimizer, if it can update all of the bucket's shards run by run; otherwise null.
  FusedOptimizer* one_pass(const ShardBucket& bucket) const;

  /// Options (lr, …) of the visible groups become those of the local groups.
  void take_options_of(const torch::optim::Optimizer& visible);
  /// The other way round: an optimizer may change its options in a step.
  void give_options_to(torch::optim::Optimizer& visible) const;

  /// The shards of used parameters get windows of `mean`, the bucket's own segment, as gradients.
  static void set_gradients(ShardBucket& bucket, const at::Tensor& mean,
                            const std::function<bool(size_t)>& is_used);
  static void clear_gradients(ShardBucket& bucket);

 private:
  OptimizerFactory factory_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  bool element_wise_ = false;
};

}  // namespace tessera::zero
