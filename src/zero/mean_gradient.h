#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sharding/detection/gradient_placeholders.h"
#include "sharding/gradients/gradient_wire.h"
#include "sharding/gradients/reducer.h"
#include "zero/early_reduction.h"
#include "zero/gradient_shards.h"
#include "zero/shards/shards.h"

namespace tessera::zero {

/// This rank's segments of the mean gradient: one segment a bucket.
///
/// [Note: where a gradient is] P is the bytes of all trainable parameters, W the number of ranks.
class MeanGradient {
 public:
  enum class State {
    /// `.grad` is this rank's own gradient. Memory: the buckets, P bytes; none with
    /// reduce_gradients off. With shard_gradients: own segments hold the mean of the backwards
    /// since
    /// zero_grad(), P / W bytes, and `.grad` is undefined.
    local,
    /// Own segments hold the mean, for clipping: in copies, P / W bytes more, or after
    /// use_up_gradients() in the buckets, where they have replaced this rank's own gradient.
    averaged,
  };

  /// `early`: reductions begin within backward.
  MeanGradient(ProcessGroup group, sharding::GradientWire& wire, bool early, Shards& shards,
               const ZeroRedundancyOptimizerOptions& options, std::string prefix);

  /// Watches all parameters that have a bucket, after buckets were added. Local.
  void watch();

  /// Null with reduce_gradients off, and where no parameter is trainable.
  sharding::Reducer* reducer() const { return reducer_.get(); }
  /// Divisor of the mean: the world size, or in a join what the join says.
  int divisor = 1;

  State state() const { return state_; }
  /// See TrainerAccess. Local; every rank calls it.
  void use_up_gradients() { in_buckets_ = !early_ && !sums_; }
  /// UsageError where a backward came after the state became `averaged`.
  void check_current() const;
  /// UsageError, naming `change`, while the state is `averaged`.
  void require_local(const std::string& change) const;
  /// The averaged gradients, if any, are used or given up. With shard_gradients they stay, as those
  /// of a plain optimizer do, until they are cleared.
  void reset();
  /// With shard_gradients: clears the gradients of the shards. Local.
  void clear_shards(bool set_to_none);
  /// With shard_gradients, before a backward that this rank only shadows, so that its program
  /// clears nothing: the gradients that a step has used are cleared as they were the last time.
  /// Local.
  void clear_used_shards() {
    if (used_up_) clear_shards(!clears_to_zero_);
  }

  /// With shard_gradients, before `.grad`s change: none of them is a placeholder, and gradients
  /// whose placeholder the program has removed are cleared. Local.
  void hide_placeholders();
  /// See sharding::Reducer.
  void hold_sync(int change);

  /// This rank's gradients are in their buckets, and the ranks know which parameters were used.
  /// Collective. State local.
  void collect();
  /// This rank's gradients in bucket `b`, flat. After collect().
  const at::Tensor& flat(size_t b) const { return reducer_->buckets()[b].flat; }
  /// Averages bucket `b` into segment(b), by a reduce-scatter, or from the sum that was taken
  /// within backward. Collective; after collect().
  void reduce_to_segment(size_t b);
  /// The sum of bucket `b`, times EarlyReduction::scale(), as it was taken within backward;
  /// undefined if there is none, or if the gradients have changed since. After collect(). Blocks.
  at::Tensor early_sum(size_t b);
  /// The group of the gradients' collectives, with their error feedback.
  sharding::GradientWire& wire() { return wire_; }
  /// After the update: the next backward may reduce. Local; every rank calls it.
  void begin_round();
  ZeroRedundancyOptimizer::Reductions reductions;
  /// Before buckets or parameters change: waits for reductions that have begun and drops them.
  /// Collective.
  void drop_early_sums();
  /// All buckets are reduced: `.grad` of used parameters is what the buckets hold. Local.
  void return_gradients();

  /// From local to averaged. Does nothing in state averaged. Collective.
  void average();

  /// Keeps a run of own segment's mean in segment(b).
  void keep(size_t b, int64_t offset, const at::Tensor& run);
  /// Own segment of the mean of bucket `b`, 1-D. After average(), reduce_to_segment() or keep().
  at::Tensor segment(size_t b);
  /// Whether any rank had a gradient for the parameter.
  bool used(size_t parameter) const;

  /// Gradient memory on this rank, in bytes.
  int64_t bytes() const;

 private:
  void copy_from_caller(size_t b);
  void watch_sharded(const std::vector<sharding::NamedTensor>& trainable,
                     sharding::ReducerOptions& options, sharding::Reducer::Callbacks& callbacks);
  void publish_means();
  void show_placeholders();
  void zero_own_part(size_t parameter);
  void reduce_held();

  ProcessGroup group_;
  sharding::GradientWire& wire_;
  Shards& shards_;
  const ZeroRedundancyOptimizerOptions& options_;
  std::string prefix_;
  State state_ = State::local;
  uint64_t generation_ = 0;           // of the reducer, when the state became averaged
  std::vector<at::Tensor> segments_;  // by bucket
  bool in_buckets_ = false;           // the mean may replace own gradients
  std::vector<char> in_place_;        // by bucket: the segment is part of the bucket
  std::vector<size_t> position_;      // of the parameters in the reducer's list
  std::optional<EarlyReduction> early_;
  std::optional<GradientShards> sums_;  // with shard_gradients
  /// Of `.grad` of the parameters while their gradients are in sums_; by position.
  std::unique_ptr<sharding::GradientPlaceholders> placeholders_;
  bool held_ = false;            // under no_sync(), or before a new watch, since the last reduction
  bool used_up_ = false;         // a step has used sums_, and no backward has added to them since
  bool clears_to_zero_ = false;  // the program keeps gradients of zero
  std::unique_ptr<sharding::Reducer> reducer_;
};

}  // namespace tessera::zero
