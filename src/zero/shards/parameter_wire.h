#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/process_group.h"
#include "zero/shards/shard_bucket.h"

namespace tessera::zero {

/// Parameters that travel encoded between hosts. After its update each owner sends the rounded
/// change of its segment. All ranks, the owner too, then hold the same values. The owner keeps the
/// rounding error, so that its next update starts from the exact values.
class ParameterWire {
 public:
  explicit ParameterWire(ProcessGroup group) : group_(std::move(group)) {}

  /// The own segment of bucket `b` gets its exact values, for the update. Local.
  void restore(size_t b, const ShardBucket& bucket);
  /// After the update: begins to send the change. Collective; does not block.
  void begin(size_t b, const ShardBucket& bucket, const std::string& tag);
  bool has_begun(size_t b) const { return sent_.count(b) > 0; }
  /// Waits for all of them, and applies all ranks' changes to the buckets. With `shared` each rank
  /// of a host applies an equal part. Collective.
  void finish(const std::vector<ShardBucket>& buckets, sharding::SharedParameters* shared);
  /// All ranks hold exact values again, or the buckets are others. Local.
  void reset();

  /// The rounding errors of the segment of bucket `b`: 1-D, in the order of the segment, of the
  /// parameters' dtype; undefined before the first step.
  at::Tensor residual(size_t b) const;
  /// Sets it. Local; every rank calls it.
  void set_residual(size_t b, at::Tensor values) { residuals_[b] = std::move(values); }
  int64_t bytes() const;

 private:
  struct Sent {
    at::Tensor changes;  // float32, of the whole bucket
    Work work;
  };

  at::Tensor segment(const ShardBucket& bucket) const;

  ProcessGroup group_;
  std::map<size_t, at::Tensor> residuals_, published_;  // of own segments, by bucket
  std::map<size_t, Sent> sent_;
};

}  // namespace tessera::zero
