#include "zero/gradient_shards.h"

#include <utility>

#include "comm/base/tree_sum.h"
#include "sharding/bucket.h"

namespace tessera::zero {

void GradientShards::send(size_t b, const ShardBucket& bucket, at::Tensor flat, at::Tensor sum,
                          double scale) {
  wait();
  const bool first = summed_.insert(b).second;
  const bool scaled = first || comm::is_narrow(flat.scalar_type());
  const auto add = [first, sum = std::move(sum), factor = scaled ? 1 : scale](
                       int64_t offset, const at::Tensor& run) {
    const at::NoGradGuard no_grad;  // on the group's thread
    auto part = sum.narrow(0, offset, run.numel());
    if (first) part.copy_(run);
    else part.add_(run, factor);
  };
  const auto feedback = wire_.scope(b);
  auto group = wire_.group(b);
  auto work = group.reduce_scatter_each_async(flat, bucket.layout.counts(), add, scaled ? scale : 1,
                                              "gradients of " + bucket.names);
  sent_ = Sent{b, std::move(flat), std::move(work)};
}

void GradientShards::wait() {
  if (!sent_) return;
  auto sent = *std::exchange(sent_, std::nullopt);
  sent.work.wait();
  wire_.commit(sent.bucket);
  sharding::release_memory(sent.flat);
}

void GradientShards::clear() {
  summed_.clear();
  used_.clear();
  wait();  // a reduction of a backward that has thrown
}

}  // namespace tessera::zero
