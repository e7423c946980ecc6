#include "zero/bucket_update.h"

#include <algorithm>
#include <utility>

namespace tessera::zero {

BucketUpdate::BucketUpdate(FusedOptimizer& optimizer, const ShardBucket& bucket,
                           std::function<bool(size_t)> is_used, double scale, bool track_norm)
    : optimizer_(optimizer),
      bucket_(bucket),
      is_used_(std::move(is_used)),
      scale_(scale),
      track_norm_(track_norm) {}

void BucketUpdate::begin() {
  for (const auto& shard : bucket_.shards) {
    ranges_.push_back(is_used_(shard.parameter) ? optimizer_.begin_update(shard.tensor)
                                                : RangeUpdate());
  }
}

void BucketUpdate::consume(int64_t offset, const at::Tensor& run) {
  if (bucket_.shards.empty()) return;  // the run has no elements, and may have another dtype
  if (ranges_.empty()) begin();
  const auto* gradient = run.data_ptr<float>();
  const int64_t end = offset + run.numel();
  for (size_t s = next_; s < bucket_.shards.size() && bucket_.shards[s].at < end; ++s) {
    const auto& shard = bucket_.shards[s];
    const int64_t from = std::max(offset, shard.at), to = std::min(end, shard.at + shard.numel);
    if (ranges_[s].kernel) {
      FusedOptimizer::update_range(ranges_[s], from - shard.at, gradient + (from - offset),
                                   to - from, static_cast<float>(scale_));
    }
    if (to == shard.at + shard.numel) next_ = s + 1;
  }
  if (track_norm_) squares_ += sum_of_squares(gradient, run.numel()) * scale_ * scale_;
}

}  // namespace tessera::zero
