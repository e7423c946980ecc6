#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "sharding/gradients/gradient_wire.h"
#include "tessera/process_group.h"
#include "zero/shards/shard_bucket.h"

namespace tessera::zero {

/// [Note: reduction within backward] Where gradients cross a wire, a bucket's reduce-scatter begins
/// when backward has completed the bucket, into memory of its own: gradient bytes / W. Parameters
/// do not change, so that clipping and schedules stay possible until step(). The user may still
/// change a gradient: another backward, zero_grad(), a write through any pointer. So each rank
/// keeps a checksum of each sent bucket. step() compares, and a bucket that has changed on any rank
/// is reduced again. After a step in which that happened, nothing is sent early for some steps.
///
/// These collectives have groups of their own, so that their order relative to other collectives
/// between backward and step() does not matter. The buckets take turns: [Note: lanes].
class EarlyReduction {
 public:
  /// `wire`: its groups are for these collectives, and for gathers in the background.
  explicit EarlyReduction(sharding::GradientWire& wire) : wire_(wire) {}

  /// Starts the reduction of bucket `b`, whose gradients are `flat`. The sum, times scale(), will
  /// be in `sum`. Collective; does not block.
  void send(size_t b, const ShardBucket& bucket, const at::Tensor& flat, at::Tensor sum);
  /// 1, and for 16-bit gradients 1 / W. (The divisor of a join may change until step().)
  double scale(const at::Tensor& flat);
  /// True if `flat` has changed since send(), or the sum was forgotten. Local.
  bool changed(size_t b, const at::Tensor& flat) const;
  /// The sum of bucket `b` is complete. Blocks.
  void wait(size_t b);
  /// The sum of bucket `b` was used up. Local.
  void forget(size_t b) { sent_.at(b).reset(); }
  /// Waits for everything that was sent and forgets it. Blocks.
  void drain();

  /// Decides whether the next backward sends; the argument: a bucket of this step had changed.
  /// Every rank calls it in each step with the same argument.
  bool next_round(bool any_changed);

 private:
  struct Sent {
    Work work;
    uint64_t checksum = 0;
  };

  sharding::GradientWire& wire_;
  std::vector<std::optional<Sent>> sent_;  // by bucket
  int pause_ = 0;                          // steps
};

}  // namespace tessera::zero
