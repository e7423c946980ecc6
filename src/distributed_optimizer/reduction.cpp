#include <algorithm>

#include "distributed_optimizer/impl.h"

// [Note: packs that do not count] Every rank sends every pack in every backward, so nobody ever
// waits for a pack that does not come. A rank that sees its gradients leave the recorded order
// marks the packs from there on. At the end of the backward the ranks add up the marks, with who
// had which gradient, in one small collective: where anybody marked a pack, all take their own
// gradients, which packs only copied, and reduce them singly.

namespace tessera {

/// Whether what has arrived on this rank is what had arrived when the packs were made, up to this
/// pack's end.
bool DistributedOptimizer::Impl::follows_record(const Lane& lane,
                                                const sharding::Bucket& bucket) const {
  if (!lane.packed || shadowing_) return true;
  const auto number = lane_of_[lane.members.front()];
  size_t position = 0;
  for (const auto i : reducer_->arrived()) {
    if (lane_of_[i] != number) continue;
    if (position == lane.record.size() || lane.record[position] != i) return false;
    ++position;
  }
  return std::all_of(bucket.members.begin(), bucket.members.end(), [&](size_t i) {
    return reducer_->has_gradient(i) ||
           std::find(lane.record.begin(), lane.record.end(), i) == lane.record.end();
  });
}

void DistributedOptimizer::Impl::send(size_t index) {
  const auto& bucket = reducer_->buckets()[index];
  auto& lane = lanes_[bucket.lane];
  followed_[index] = follows_record(lane, bucket);
  sent_.push_back(lane.group.all_reduce_async(bucket.flat, scale(lane)));
}

void DistributedOptimizer::Impl::drain() {
  auto sent = std::exchange(sent_, {});
  for (auto& work : sent) work.wait();
}

void DistributedOptimizer::Impl::finish() {
  std::vector<at::Tensor> counts;
  std::vector<Work> counted;
  for (size_t l = 0; l < lanes_.size(); ++l) {
    counts.push_back(start_agreement(l));
    counted.push_back(lanes_[l].group.all_reduce_async(counts.back()));
  }
  drain();
  for (size_t l = 0; l < lanes_.size(); ++l) {
    counted[l].wait();
    settle(l, counts[l].cpu());
  }
  ++reductions_;
}

/// Who had which gradient, then which buckets of the lane were sent out of order.
at::Tensor DistributedOptimizer::Impl::start_agreement(size_t l) {
  std::vector<int> mine;
  for (const auto i : lanes_[l].members) mine.push_back(reducer_->has_gradient(i));
  const auto& buckets = reducer_->buckets();
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (buckets[b].lane == l) mine.push_back(!followed_[b]);
  }
  return at::tensor(mine, at::kInt).to(lanes_[l].group.control_device());
}

void DistributedOptimizer::Impl::settle(size_t l, const at::Tensor& counts) {
  auto& lane = lanes_[l];
  const auto* count = counts.data_ptr<int>();
  for (const auto i : lane.members) {
    if (*count++ > 0) reducer_->set_used(i);
  }
  bool all_followed = true;
  std::vector<Work> singles;
  const auto& buckets = reducer_->buckets();
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (buckets[b].lane != l || *count++ == 0) continue;
    all_followed = false;
    for (size_t m = 0; m < buckets[b].members.size(); ++m) {
      const auto i = buckets[b].members[m];
      if (!reducer_->used(i)) continue;
      auto view = buckets[b].views[m];
      if (reducer_->has_gradient(i)) view.copy_(trainable_[i].tensor.grad());
      else view.zero_();
      singles.push_back(lane.group.all_reduce_async(view, scale(lane)));
    }
  }
  for (auto& work : singles) work.wait();
  if (options_.param_pack && (!lane.packed || !all_followed)) note_order(lane, l);
}

/// For the packs that step() makes.
void DistributedOptimizer::Impl::note_order(Lane& lane, size_t l) {
  lane.repack_due = true;
  if (shadowing_) return;
  lane.record.clear();
  for (const auto i : reducer_->arrived()) {
    if (lane_of_[i] == l) lane.record.push_back(i);
  }
}

void DistributedOptimizer::Impl::broadcast(int root) {
  for (auto& lane : lanes_) lane.group.broadcast(lane.tensors, root);
}

}  // namespace tessera
