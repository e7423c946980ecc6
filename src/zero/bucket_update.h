#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/optim/fused_optimizer.h"
#include "zero/shards/shard_bucket.h"

namespace tessera::zero {

/// [Note: two ways to update] If the local optimizer is a FusedOptimizer and the shards are float32
/// on the CPU, each run of the summed gradient updates its elements while it is in the cache,
/// straight from the reduce-scatter: this class. Otherwise the mean is kept in own segment, shards
/// get windows of it as gradients, and the local optimizer steps. Both give the same bits.
///
/// One bucket's update during its reduce-scatter. Not thread-safe.
class BucketUpdate {
 public:
  /// `is_used` is asked when the first run arrives. The gradient is the sum times `scale`.
  /// `track_norm`: also accumulates squares().
  BucketUpdate(FusedOptimizer& optimizer, const ShardBucket& bucket,
               std::function<bool(size_t parameter)> is_used, double scale, bool track_norm);

  /// Updates with elements [offset, offset + run.numel()) of own segment's sum. Runs come in
  /// ascending order.
  void consume(int64_t offset, const at::Tensor& run);
  /// Sum of squares of the mean gradient so far.
  double squares() const { return squares_; }

 private:
  void begin();

  FusedOptimizer& optimizer_;
  const ShardBucket& bucket_;
  std::function<bool(size_t)> is_used_;
  double scale_;
  bool track_norm_;
  std::vector<RangeUpdate> ranges_;  // one a shard; without a kernel for unused parameters
  size_t next_ = 0;                  // the first shard that is not updated to its end
  double squares_ = 0;
};

}  // namespace tessera::zero
