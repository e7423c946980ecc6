#include "zero/shards/parameter_wire.h"

#include <utility>

namespace tessera::zero {

at::Tensor ParameterWire::segment(const ShardBucket& bucket) const {
  const int rank = group_.rank();
  return bucket.parameters.narrow(0, bucket.layout.segment_begin(rank),
                                  bucket.layout.counts()[rank]);
}

void ParameterWire::restore(size_t b, const ShardBucket& bucket) {
  auto own = segment(bucket);
  published_[b] = own.clone();
  if (const auto lacking = residual(b); lacking.defined()) own.add_(lacking);
}

void ParameterWire::begin(size_t b, const ShardBucket& bucket, const std::string& tag) {
  const int rank = group_.rank();
  const auto& layout = bucket.layout;
  auto changes = at::empty({layout.numel()}, bucket.parameters.options().dtype(at::kFloat));
  changes.narrow(0, layout.segment_begin(rank), layout.counts()[rank])
      .copy_(segment(bucket).to(at::kFloat) - published_.at(b).to(at::kFloat));
  auto work = group_.all_gather_async(changes, layout.counts(), tag);
  sent_[b] = {std::move(changes), std::move(work)};
}

void ParameterWire::finish(const std::vector<ShardBucket>& buckets,
                           sharding::SharedParameters* shared) {
  auto sent = std::exchange(sent_, {});
  for (auto& [b, one] : sent) {
    one.work.wait();
    auto own = segment(buckets[b]);
    residuals_[b] = own.clone();
    own.copy_(published_.extract(b).mapped());
  }
  if (shared) shared->wait_for_readers();
  for (const auto& [b, one] : sent) {
    const int64_t parts = shared ? group_.local_size() : 1, part = shared ? group_.local_rank() : 0;
    const int64_t numel = one.changes.numel(), begin = part * numel / parts;
    const int64_t count = (part + 1) * numel / parts - begin;
    buckets[b].parameters.narrow(0, begin, count).add_(one.changes.narrow(0, begin, count));
  }
  if (shared) shared->wait_for_readers();
  for (const auto& [b, one] : sent) residuals_[b].sub_(segment(buckets[b]));
}

void ParameterWire::reset() {
  residuals_.clear();
  published_.clear();
}

at::Tensor ParameterWire::residual(size_t b) const {
  const auto found = residuals_.find(b);
  return found == residuals_.end() ? at::Tensor() : found->second;
}

int64_t ParameterWire::bytes() const {
  int64_t total = 0;
  for (const auto& [bucket, residual] : residuals_)
    total += static_cast<int64_t>(residual.nbytes());
  return total;
}

}  // namespace tessera::zero
