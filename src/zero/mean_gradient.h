#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sharding/gradients/gradient_wire.h"
#include "sharding/gradients/reducer.h"
#include "zero/shards/shards.h"

namespace tessera::zero {

/// This rank's segments of the mean gradient: one segment a bucket.
///
/// [Note: where a gradient is] P is the bytes of all trainable parameters, W the number of ranks.
/// StepGradient: `.grad` is this rank's own gradient, a window of its bucket: P bytes. The mean
/// exists in step(), and from clipping on. ShardedGradient: own segments hold the mean of the
/// backwards since zero_grad(), P / W bytes, and `.grad` is a placeholder.
class MeanGradient : protected sharding::ReductionPolicy {
 public:
  MeanGradient(const MeanGradient&) = delete;

  /// Watches all parameters that have a bucket, after buckets were added. Collective where
  /// reductions are under way, otherwise local.
  void watch();
  /// Null with reduce_gradients off, and where no parameter is trainable.
  sharding::Reducer* reducer() const { return reducer_.get(); }
  /// Divisor of the mean: the world size, or the divisor of the join.
  int divisor;
  ZeroRedundancyOptimizer::Reductions reductions;
  /// See sharding::Reducer.
  virtual void hold_sync(int change);

  /// From here on own segments hold the mean. Collective.
  virtual void average() = 0;
  /// Before an update: collects this rank's gradients where they are not averaged yet. Collective.
  virtual void begin_update() = 0;
  /// True if own segments hold the mean.
  virtual bool averaged() const = 0;
  /// Own segment of the mean of bucket `b`, 1-D. Its values count after average().
  at::Tensor segment(size_t b);
  /// True if any rank had a gradient for the parameter.
  virtual bool used(size_t parameter) const = 0;

  /// UsageError, naming `change`, where it would lose a mean that was taken already.
  virtual void require_local(const std::string& /*change*/) const {}
  /// The caller has changed gradients of shards since they were reduced. Local.
  virtual bool edited() { return false; }
  /// Before parameters or `.grad`s change: `.grad`s are gradients or undefined. Local.
  virtual void hide_placeholders() {}
  /// The averaged gradients, if any, were used or dropped.
  virtual void reset() = 0;
  /// zero_grad() was called. Local.
  virtual void clear(bool /*set_to_none*/) {}
  /// On a rank without data, a backward of the others; false: it has no collective, and the own
  /// gradients are to be cleared. Collective.
  virtual bool shadow() { return false; }

  /// Gradient memory on this rank, in bytes.
  int64_t bytes() const;

 protected:
  MeanGradient(ProcessGroup group, sharding::GradientWire& wire, Shards& shards,
               const ZeroRedundancyOptimizerOptions& options, std::string prefix);

  /// The buckets become others: drops what was reduced for the former ones. Collective.
  virtual void drop_sums() {}
  /// The reducer's options for this class. `first`: nothing was watched before.
  virtual void add_to(sharding::ReducerOptions& options, bool first) = 0;
  /// `trainable` are watched.
  virtual void watched(const std::vector<sharding::NamedTensor>& /*trainable*/, bool /*first*/) {}
  /// True if the bucket's own memory, or that of its segment, counts in bytes().
  virtual bool has_bucket(size_t b) const = 0;
  virtual bool has_segment(size_t b) const { return segments_[b].defined(); }

  const at::Tensor& flat(size_t b) const { return reducer_->buckets()[b].flat; }

  ProcessGroup group_;
  sharding::GradientWire& wire_;
  Shards& shards_;
  const ZeroRedundancyOptimizerOptions& options_;
  std::string prefix_;
  std::vector<at::Tensor> segments_;  // by bucket
  std::vector<size_t> position_;      // of the parameters in the reducer's list
  std::unique_ptr<sharding::Reducer> reducer_;
  std::unique_ptr<sharding::BackwardWatch> watch_;  // without a reducer
};

}  // namespace tessera::zero
