#include "distributed_optimizer/packed_reduction.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include <c10/util/ScopeExit.h>

#include "sharding/bucket_plan.h"

// [Note: packs that do not count] Every rank sends every pack in every backward pass, so that no
// rank waits for a pack that another rank does not send. When a rank's gradients arrive in another
// order than the recorded one, that rank marks the packs from there on. At the end of the backward
// pass one small all-reduce adds up the marks, and which rank had which gradient. If any rank
// marked a pack, all ranks discard its result and reduce its gradients one by one. The local
// gradients are still there, because packs are copies of them. The same all-reduce says which
// parameters any rank has written since the last step().

namespace tessera::distributed_optimizer {
namespace {

/// "float32" and so on for CPU tensors, with the device appended for others. pack_by_arrival()
/// orders the last packs by this text, so every rank must get the same one.
std::string dtype_name(const at::Tensor& tensor) {
  std::string name = c10::toString(tensor.scalar_type());
  if (tensor.scalar_type() == at::kHalf) name = "float16";
  if (tensor.scalar_type() == at::kBFloat16) name = "bfloat16";
  if (tensor.scalar_type() == at::kFloat) name = "float32";
  if (tensor.scalar_type() == at::kDouble) name = "float64";
  return tensor.device().is_cpu() ? name : name + " " + tensor.device().str();
}

// Those of DistributedDataParallel.
constexpr int64_t kFirstBucketBytes = 1 << 20, kBucketBytes = 25 << 20;

bool contains(const std::vector<size_t>& list, size_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

/// Backward produces gradients from the last parameter to the first. Packs that will be made from
/// the order of arrival begin with one for each gradient.
Packs first_packs(const std::vector<sharding::NamedTensor>& parameters, std::vector<size_t> members,
                  bool by_arrival) {
  std::reverse(members.begin(), members.end());
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : parameters) tensors.push_back(parameter.tensor);
  return sharding::plan_buckets(tensors, members, by_arrival ? 0 : kFirstBucketBytes,
                                by_arrival ? 0 : kBucketBytes);
}

}  // namespace

PackedReduction::PackedReduction(std::vector<sharding::NamedTensor> parameters,
                                 std::vector<Group> groups, ThawedGradients& thawed,
                                 PackedReductionOptions options)
    : options_(options),
      parameters_(std::move(parameters)),
      thawed_(thawed),
      lane_of_(parameters_.size()) {
  for (auto& group : groups) {
    auto& lane = lanes_.emplace_back(Lane{std::move(group), {}, {}});
    for (const auto i : lane.members) lane_of_[i] = lanes_.size() - 1;
    lane.packs = first_packs(parameters_, lane.members, options_.pack);
    lane.channel = 0;
    while (lanes_[lane.channel].group.impl() != lane.group.impl()) ++lane.channel;
    const bool first = &lanes_[lane.channel] == &lane;
    lane.wire = first ? std::make_shared<sharding::GradientWire>(
                            sharding::Lanes(lane.group, options_.wire, 1))
                      : lanes_[lane.channel].wire;
  }
  make_reducer();
  if (options_.compare_writes) writes_ = sharding::ForwardWrites(parameters_);
  writes_.restart();
}

void PackedReduction::make_reducer() {
  sharding::ReducerOptions reducing;
  reducing.component = "DistributedOptimizer";
  reducing.find_unused_parameters = true;
  reducing.caller_tracks_use = true;
  // Packs must be copies, see [Note: packs that do not count].
  reducing.gradient_as_bucket_view = !options_.pack;
  reducing.overwritten =
      "is the sum over the ranks of an earlier backward, which this backward would add up again on "
      "each rank; expected zero_grad() before it, no_sync() around all backwards of a step but the "
      "last, or reduce_method \"mean\"";
  sharding::ReductionPolicy* const policy = this;
  reducer_ = std::make_unique<sharding::Reducer>(lanes_[0].group, parameters_, make_buckets(),
                                                 reducing, policy);
}

/// A sum that stays in `.grad` would be summed once more by the next backward. (A mean of equal
/// means is the same mean.)
void PackedReduction::finished() {
  for (size_t i = 0; !options_.mean && i < parameters_.size(); ++i)
    if (lanes_[lane_of_[i]].group.size() > 1 && reducer_->used(i)) reducer_->mark_overwritten(i);
}

/// All packs of one dtype and device share one allocation in each group, because an allocation is a
/// collective.
std::vector<sharding::Bucket> PackedReduction::make_buckets() {
  constexpr int64_t kAlignment = 64;                             // bytes
  using Kind = std::tuple<size_t, at::ScalarType, std::string>;  // channel, dtype, device
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : parameters_) tensors.push_back(parameter.tensor);
  std::vector<sharding::Bucket> buckets;
  std::vector<std::pair<Kind, int64_t>> places;
  std::map<Kind, int64_t> sizes;
  for (const auto& [l, p] : order_of_packs()) {
    const auto& lane = lanes_[l];
    const auto& first = tensors[lane.packs[p][0]];
    std::vector<int64_t> numels;
    for (const auto i : lane.packs[p]) numels.push_back(tensors[i].numel());
    auto& bucket = buckets.emplace_back();
    bucket.members = lane.packs[p];
    bucket.layout = sharding::Layout::flat(std::move(numels), lane.group.size());
    bucket.lane = lane.channel;
    const Kind kind{lane.channel, first.scalar_type(), first.device().str()};
    places.emplace_back(kind, sizes[kind]);
    const int64_t unit = kAlignment / first.element_size();
    sizes[kind] += (bucket.layout.numel() + unit - 1) / unit * unit;
  }
  std::map<Kind, at::Tensor> memory;
  for (size_t b = 0; b < buckets.size(); ++b) {
    const auto& [kind, at] = places[b];
    auto& [members, layout, flat, views, channel] = buckets[b];
    auto& all = memory[kind];
    const auto options = tensors[members[0]].options().requires_grad(false);
    auto group = lanes_[channel].wire->group();
    if (!all.defined()) all = group.allocate(sizes[kind], options);
    flat = sharding::window(all, at, layout.numel());
    buckets[b] = sharding::make_bucket(members, layout, flat, tensors);
    buckets[b].lane = channel;
  }
  followed_.assign(buckets.size(), true);
  return buckets;
}

/// Lane and number of each pack, in the order in which packs are sent. Lanes of one channel take
/// turns by their sizes, because backward mostly produces their gradients side by side.
std::vector<std::pair<size_t, size_t>> PackedReduction::order_of_packs() const {
  std::vector<std::pair<size_t, size_t>> order;
  for (size_t l = 0; l < lanes_.size(); ++l)
    for (size_t p = 0; p < lanes_[l].packs.size(); ++p) order.emplace_back(l, p);
  std::stable_sort(order.begin(), order.end(), [this](const auto& a, const auto& b) {
    // a.second / packs of a < b.second / packs of b, in whole numbers
    return a.second * lanes_[b.first].packs.size() < b.second * lanes_[a.first].packs.size();
  });
  return order;
}

size_t PackedReduction::lane_of(const sharding::Bucket& bucket) const {
  return lane_of_[bucket.members[0]];
}

double PackedReduction::scale(const Lane& lane) const {
  return options_.mean ? 1.0 / (divisor_ ? divisor_ : lane.group.size()) : 1;
}

/// A program may clear the gradients itself, without a step(). After a step() this has no effect.
void PackedReduction::notice_cleared() {
  if (std::none_of(parameters_.begin(), parameters_.end(),
                   [](const auto& parameter) { return parameter.tensor.grad().defined(); }))
    end_step(false);
}

void PackedReduction::backward(const at::Tensor& loss) {
  notice_cleared();
  const auto before = reductions_;
  loss.backward();
  // A loss without any of the parameters triggers no hook, but the other ranks wait for this one.
  if (sync() && reductions_ == before) reducer_->flush();
}

void PackedReduction::shadow_backward() {
  notice_cleared();
  shadowing_ = true;
  const auto reset = c10::make_scope_exit([this] { shadowing_ = false; });
  reducer_->shadow();
}

void PackedReduction::rescale_wire(double factor) {
  for (size_t l = 0; l < lanes_.size(); ++l)
    if (lanes_[l].channel == l) lanes_[l].wire->rescale(factor);  // shared ones once
}

void PackedReduction::set_join(const JoinIteration& iteration) {
  divisor_ = iteration.divisor;
  publisher_ = iteration.first_active;
  writes_.pause(iteration.active_ranks < lanes_[0].group.size());
}

void PackedReduction::start(size_t index) {
  const auto& bucket = reducer_->buckets()[index];
  followed_[index] = follows_record(lane_of(bucket), bucket);
  if (options_.overlap) reduce_bucket(index);
  else complete_.push_back(index);
}

void PackedReduction::reduce_bucket(size_t index) {
  const auto& bucket = reducer_->buckets()[index];
  auto& lane = lanes_[lane_of(bucket)];
  const auto feedback = lane.wire->scope(index);
  auto group = lane.wire->group();
  started_.push_back(group.all_reduce_async(
      bucket.flat, scale(lane),
      "gradients of " + sharding::first_to_last(parameters_, bucket.members)));
}

void PackedReduction::abandon() {
  complete_.clear();
  auto started = std::exchange(started_, {});
  for (auto& work : started) work.wait();
  for (auto& lane : lanes_) lane.wire->commit();
}

void PackedReduction::finish() {
  for (const auto index : std::exchange(complete_, {})) reduce_bucket(index);
  std::vector<at::Tensor> counts;
  std::vector<Work> works;
  for (size_t l = 0; l < lanes_.size(); ++l) {
    counts.push_back(use_and_deviations(l));
    works.push_back(lanes_[l].group.all_reduce_async(
        counts.back(), 1, options_.describe_step(lanes_[l].parameter_group)));
  }
  abandon();
  for (size_t l = 0; l < lanes_.size(); ++l) {
    works[l].wait();
    settle(l, counts[l].cpu());
  }
  thawed_.reduce(options_.mean, divisor_);
  writes_.restart();
  ++reductions_;
}

/// True if the gradients that have arrived on this rank, up to the end of `bucket`, are those that
/// had arrived at the same point when the packs were made.
bool PackedReduction::follows_record(size_t l, const sharding::Bucket& bucket) const {
  const auto& lane = lanes_[l];
  if (!lane.packed || shadowing_) return true;
  size_t position = 0;
  for (const auto i : reducer_->arrived()) {
    if (lane_of_[i] != l) continue;
    if (position == lane.record.size() || lane.record[position] != i) return false;
    ++position;
  }
  return std::all_of(bucket.members.begin(), bucket.members.end(), [&](size_t i) {
    return reducer_->has_gradient(i) || !contains(lane.record, i);
  });
}

/// One number for each member of the lane: 1 if this rank has a gradient for it, plus a number
/// above the sum of all such 1s if this rank has written it. Then one flag for each bucket of the
/// lane: this rank's gradients did not follow the record.
at::Tensor PackedReduction::use_and_deviations(size_t l) const {
  std::vector<int> flags;
  const int written = lanes_[l].group.size() + 1;
  for (const auto i : lanes_[l].members)
    flags.push_back(reducer_->has_gradient(i) + (writes_.written(i) ? written : 0));
  const auto& buckets = reducer_->buckets();
  for (size_t b = 0; b < buckets.size(); ++b)
    if (lane_of(buckets[b]) == l) flags.push_back(!followed_[b]);
  return at::tensor(flags, at::kInt).to(lanes_[l].group.control_device());
}

/// Takes the sums of use_and_deviations() over the ranks. Reduces the members of the packs that do
/// not count one by one.
void PackedReduction::settle(size_t l, const at::Tensor& counts) {
  auto& lane = lanes_[l];
  const auto* count = counts.data_ptr<int>();
  const int written = lane.group.size() + 1;
  for (const auto i : lane.members) {
    if (*count % written > 0) reducer_->set_used(i);
    if (*count++ >= written) writes_.compare("DistributedOptimizer", lane.group, i);
  }
  bool all_followed = true;
  std::vector<Work> singles;
  const auto& buckets = reducer_->buckets();
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (lane_of(buckets[b]) != l || *count++ == 0) continue;
    all_followed = false;
    for (size_t m = 0; m < buckets[b].members.size(); ++m) {
      const auto i = buckets[b].members[m];
      if (!reducer_->used(i)) continue;
      auto view = buckets[b].views[m];
      if (reducer_->has_gradient(i)) view.copy_(parameters_[i].tensor.grad());
      else view.zero_();
      singles.push_back(
          lane.group.all_reduce_async(view, scale(lane), "gradient of " + parameters_[i].name));
    }
  }
  for (auto& work : singles) work.wait();
  if (options_.pack && (!lane.packed || !all_followed)) record_arrival(l);
}

/// Records this backward's order of arrival, from which the next repack() makes the packs.
void PackedReduction::record_arrival(size_t l) {
  auto& lane = lanes_[l];
  lane.repack_due = true;
  if (shadowing_) return;
  lane.record.clear();
  for (const auto i : reducer_->arrived())
    if (lane_of_[i] == l) lane.record.push_back(i);
}

void PackedReduction::repack() {
  if (std::none_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.repack_due; }))
    return;
  std::vector<PackItem> items;
  for (const auto& [name, tensor] : parameters_)
    items.push_back({dtype_name(tensor), static_cast<int64_t>(tensor.nbytes())});
  for (auto& lane : lanes_)
    if (lane.repack_due) repack(lane, items);
  for (auto& lane : lanes_) lane.wire->reset();
  reducer_->replace_buckets(make_buckets());
}

void PackedReduction::repack(Lane& lane, const std::vector<PackItem>& items) {
  auto packs = pack_by_arrival(items, lane.record, options_.pack_threshold);
  for (const auto i : lane.members)
    if (!contains(lane.record, i)) packs.push_back({i});
  // Packs are published as positions within the lane: the other ranks of the group may have other
  // parameter groups before this one.
  const auto first = lane.members.front();
  for (auto& pack : packs)
    for (auto& i : pack) i -= first;
  lane.packs = packs_from_text(lane.group.broadcast_bytes(to_text(packs), publisher_));
  for (auto& pack : lane.packs)
    for (auto& i : pack) i += first;
  lane.packed = true;
  lane.repack_due = false;
}

std::vector<std::vector<std::string>> PackedReduction::pack_names(size_t parameter_group) const {
  std::vector<std::vector<std::string>> result;
  for (const auto& lane : lanes_) {
    if (lane.parameter_group != parameter_group) continue;
    for (const auto& pack : lane.packs) {
      auto& names = result.emplace_back();
      for (const auto i : pack) names.push_back(parameters_[i].name);
    }
  }
  return result;
}

}  // namespace tessera::distributed_optimizer
