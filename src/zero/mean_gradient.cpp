#include "zero/mean_gradient.h"

#include <utility>

#include "sharding/bucket.h"

namespace tessera::zero {

MeanGradient::MeanGradient(ProcessGroup group, sharding::GradientWire& wire, Shards& shards,
                           const ZeroRedundancyOptimizerOptions& options, std::string prefix)
    : divisor(group.size()),
      group_(std::move(group)),
      wire_(wire),
      shards_(shards),
      options_(options),
      prefix_(std::move(prefix)) {}

void MeanGradient::watch() {
  const bool first = segments_.empty();
  drop_sums();
  wire_.reset();
  segments_.resize(shards_.buckets().size());
  reducer_.reset();
  const auto subset = shards_.all_in_buckets();
  if (subset.empty()) return;
  std::vector<sharding::NamedTensor> trainable;
  std::vector<at::Tensor> tensors;
  position_.assign(shards_.parameters().size(), 0);
  for (const auto i : subset) {
    position_[i] = trainable.size();
    trainable.push_back(shards_.parameters()[i]);
    tensors.push_back(trainable.back().tensor);
  }
  if (!options_.reduce_gradients) {
    const auto arrived = [](size_t, const at::Tensor&) {};
    const auto ended = [](bool) {};
    watch_.reset();
    watch_ = std::make_unique<sharding::BackwardWatch>(
        tensors, sharding::BackwardWatch::Callbacks{[this] { begin(); }, arrived, ended, true});
    return;
  }
  std::vector<sharding::Bucket> buckets;
  for (const auto& bucket : shards_.buckets()) {
    buckets.push_back(bucket.gradients);
    for (auto& member : buckets.back().members) member = position_[member];
  }
  sharding::ReducerOptions options;
  options.component = kName;
  options.find_unused_parameters = true;
  add_to(options, first);
  sharding::ReductionPolicy* const policy = this;
  reducer_ =
      std::make_unique<sharding::Reducer>(group_, trainable, std::move(buckets), options, policy);
  watched(trainable, first);
}

void MeanGradient::hold_sync(int change) {
  if (reducer_) reducer_->hold_sync(change);
}

at::Tensor MeanGradient::segment(size_t b) {
  if (!segments_[b].defined()) {
    const auto& bucket = shards_.buckets()[b];
    const auto& first = shards_.parameters()[bucket.members[0]].tensor;
    segments_[b] =
        at::empty({bucket.layout.counts()[group_.rank()]}, first.options().requires_grad(false));
  }
  return segments_[b];
}

int64_t MeanGradient::bytes() const {
  int64_t bytes = 0;
  for (size_t b = 0; b < shards_.buckets().size(); ++b) {
    if (options_.reduce_gradients && has_bucket(b)) bytes += shards_.buckets()[b].gradients.bytes();
    if (has_segment(b)) bytes += static_cast<int64_t>(segments_[b].nbytes());
  }
  return bytes;
}

}  // namespace tessera::zero
