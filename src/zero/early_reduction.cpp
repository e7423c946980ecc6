#include "zero/early_reduction.h"

#include <algorithm>
#include <utility>

#include <xxhash.h>

#include "comm/base/tree_sum.h"

namespace tessera::zero {
namespace {

constexpr int kPause = 16;  // steps

uint64_t checksum_of(const at::Tensor& flat) { return XXH3_64bits(flat.data_ptr(), flat.nbytes()); }

}  // namespace

void EarlyReduction::send(size_t b, const ShardBucket& bucket, const at::Tensor& flat,
                          at::Tensor sum) {
  if (sent_.size() <= b) sent_.resize(b + 1);
  const auto checksum = checksum_of(flat);  // before any rank reads, so that no write is missed
  const auto feedback = wire_.scope(b);
  auto group = wire_.group(b);
  sent_[b] = Sent{group.reduce_scatter_into_async(flat, bucket.layout.counts(), std::move(sum),
                                                  scale(flat), "gradients of " + bucket.names),
                  checksum};
}

double EarlyReduction::scale(const at::Tensor& flat) {
  return comm::is_narrow(flat.scalar_type()) ? 1.0 / wire_.group().size() : 1;
}

bool EarlyReduction::changed(size_t b, const at::Tensor& flat) const {
  return b >= sent_.size() || !sent_[b] || sent_[b]->checksum != checksum_of(flat);
}

void EarlyReduction::wait(size_t b) {
  if (b < sent_.size() && sent_[b]) sent_[b]->work.wait();
}

void EarlyReduction::drain() {
  for (size_t b = 0; b < sent_.size(); ++b) wait(b);
  sent_.clear();
}

bool EarlyReduction::next_round(bool any_changed) {
  const bool in_vain = any_changed && !sent_.empty();
  drain();
  if (in_vain) pause_ = kPause;
  else if (pause_ > 0) --pause_;
  return pause_ == 0;
}

}  // namespace tessera::zero
