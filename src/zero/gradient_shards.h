#pragma once

#include <optional>
#include <set>

#include "sharding/gradients/gradient_wire.h"
#include "tessera/process_group.h"
#include "zero/shards/shard_bucket.h"

namespace tessera::zero {

/// [Note: sharded gradients] With shard_gradients (stage 2 of ZeRO), backward reduces each bucket
/// when it is complete and adds this rank's part of the mean to its segment. The memory of the
/// bucket then goes back to the system; the next gradient in it gets new pages. One bucket is
/// reduced at a time: a bucket that becomes complete waits for the one before. So a rank's
/// gradients take its segments, one bucket that is being reduced, and the gradients that backward
/// has produced since.
///
/// The sums of the segments, which may come from several backwards.
class GradientShards {
 public:
  explicit GradientShards(sharding::GradientWire& wire) : wire_(wire) {}

  /// Begins to reduce `flat`, the gradients of bucket `b`: `sum` grows by `scale` times their sum.
  /// Waits for the bucket before. Collective.
  void send(size_t b, const ShardBucket& bucket, at::Tensor flat, at::Tensor sum, double scale);
  /// All buckets that were sent are in their sums, and have no memory. Blocks.
  void wait();

  bool has_sum(size_t b) const { return summed_.count(b) > 0; }
  bool any() const { return !summed_.empty(); }
  /// Some rank had a gradient for the parameter.
  void set_used(size_t parameter) { used_.insert(parameter); }
  /// The gradient of the parameter was cleared. Without any other there are no sums.
  void set_unused(size_t parameter) {
    used_.erase(parameter);
    if (used_.empty()) summed_.clear();
  }
  bool used(size_t parameter) const { return used_.count(parameter) > 0; }
  /// There are no sums. Local.
  void clear();

 private:
  struct Sent {
    size_t bucket;
    at::Tensor flat;
    Work work;
  };

  sharding::GradientWire& wire_;
  std::optional<Sent> sent_;
  std::set<size_t> summed_;  // buckets
  std::set<size_t> used_;    // parameters
};

}  // namespace tessera::zero
