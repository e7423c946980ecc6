#include "ddp/ddp_reduction.h"

#include <algorithm>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include "comm/group/tag_scope.h"
#include "ddp/bucket_cap.h"
#include "sharding/bucket_plan.h"
#include "sharding/detection/detection.h"

namespace tessera {
namespace {

constexpr double kMiB = 1 << 20;

}  // namespace

DdpReduction::DdpReduction(DdpModel& model, const DistributedDataParallelOptions& options)
    : model_(model),
      options_(options),
      in_background_(overlaps_in_background() &&
                     sharding::start_detection_for(kDdpName, model.group.rank(), "gradients",
                                                   "overlap background")),
      divisor_(model.group.size()) {
  model_.check_contract(fmt::format(
      "options: buckets {} and {} MiB, find_unused_parameters {}, static_graph {}, wire: {}{}, "
      "overlap {}{}",
      options_.first_bucket_mb, options_.bucket_cap_mb.value_or(0), options_.find_unused_parameters,
      options_.static_graph, to_string(options_.wire),
      options_.share_parameters ? ", share_parameters" : "", static_cast<int>(options_.overlap),
      in_background_ ? " in fact" : ""));
  order_.cap_mib = options_.bucket_cap_mb.value_or(kDefaultBucketMib);
  // A hook's results and rounded values may depend on the size, so it must not vary.
  if (!options_.bucket_cap_mb && !options_.comm_hook &&
      options_.wire.gradients == WireFormat::float32)
    order_.cap_mib = choose_bucket_mib(model_.group);
  model_.place();
  wire_.emplace(lanes());
  model_.broadcast(0);
  make_reducer();
}

/// Of the parameters that require a gradient now. Collective.
void DdpReduction::make_reducer() {
  forward_writes_ = sharding::ForwardWrites(model_.trainable);
  order_.stage = BucketOrder::Stage::of_parameters;
  order_.share_in_backward = 1;
  order_.arrival.clear();
  // Backward produces gradients about in reverse order.
  for (size_t i = model_.trainable.size(); i-- > 0;) order_.arrival.push_back(i);
  sharding::ReducerOptions reducing;
  reducing.component = kDdpName;
  reducing.find_unused_parameters = options_.find_unused_parameters;
  reducing.static_graph = options_.static_graph;
  reducing.offers_static_graph = true;
  reducing.in_background = in_background_;
  sharding::ReductionPolicy* const policy = this;
  reducer_ = std::make_unique<sharding::Reducer>(model_.group, model_.trainable, make_buckets(),
                                                 reducing, policy);
  if (in_background_) updates_.emplace(model_.trainable, *reducer_->arriving());
}

/// Collectives of a hook or on a device end within backward.
bool DdpReduction::overlaps_in_background() const {
  return options_.overlap == Overlap::background && model_.group.size() > 1 &&
         !options_.comm_hook &&
         std::all_of(model_.trainable.begin(), model_.trainable.end(),
                     [](const auto& parameter) { return parameter.tensor.device().is_cpu(); });
}

sharding::Lanes DdpReduction::lanes() const {
  const auto format = options_.wire.gradients;
  const size_t count = options_.comm_hook ? 1 : sharding::lanes_between_hosts(model_.group);
  return {model_.group, format, count, in_background_};
}

void DdpReduction::before_forward() {
  reducer_->check_attached();
  if (!reducer_->sync() || !at::GradMode::is_enabled()) return;
  forward_writes_.begin(!model_.module.is_training());
  if (model_.module.is_training()) begin_pass();
}

/// Parameters were frozen or thawed. Gradients that have accumulated move to the new buckets.
void DdpReduction::follow_trainability() {
  if (!model_.follow_trainability()) return;
  wait();
  updates_.reset();
  reducer_.reset();  // before the new one registers its hooks
  wire_->reset();
  make_reducer();
  forward_writes_.begin();
}

/// A forward pass that a synchronising backward will follow.
void DdpReduction::begin_pass() {
  follow_trainability();
  model_.synchronize_buffers();
  ++forwards_;
}

void DdpReduction::shadow() {
  model_.has_data = false;
  const auto reset = c10::make_scope_exit([this] { model_.has_data = true; });
  if (model_.module.is_training()) begin_pass();
  reducer_->shadow();
}

void DdpReduction::set_join(const JoinIteration& iteration) {
  divisor_ = iteration.divisor;
  publisher_ = iteration.first_active;
  forward_writes_.pause(iteration.active_ranks < model_.group.size());
  model_.set_active(iteration);
}

void DdpReduction::wait() {
  wait_for_buckets();
  reducer_->wait_for_arrivals();
  if (std::exchange(uncommitted_, false)) wire_->commit();
}

void DdpReduction::end_step(StepEnd end) {
  sharding::check_scale_change(kDdpName, model_.group.rank(), end.scale);
  wait();
  wire_->end_step(end.used);
  wire_->rescale(end.scale);
}

/// Buckets of the trainable parameters, filled in the order in which the gradients are expected to
/// arrive.
std::vector<sharding::Bucket> DdpReduction::make_buckets() {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : model_.trainable) tensors.push_back(parameter.tensor);
  auto plan = sharding::plan_buckets(tensors, order_.arrival,
                                     static_cast<int64_t>(options_.first_bucket_mb * kMiB),
                                     static_cast<int64_t>(order_.cap_mib * kMiB));
  std::vector<sharding::Bucket> buckets;
  for (const auto b : order_of_reductions(plan.size(), order_.share_in_backward)) {
    auto& members = plan[b];
    std::vector<int64_t> sizes;
    for (const auto i : members) sizes.push_back(tensors[i].numel());
    auto layout = sharding::Layout::flat(std::move(sizes), model_.group.size());
    auto group = wire_->group(buckets.size());
    auto flat = group.allocate(layout.numel(), tensors[members[0]].options().requires_grad(false));
    buckets.push_back(
        sharding::make_bucket(std::move(members), std::move(layout), std::move(flat), tensors));
  }
  return buckets;
}

void DdpReduction::start(size_t index) {
  if (options_.overlap == Overlap::none) complete_.push_back(index);
  else reduce(index);
}

void DdpReduction::reduce(size_t index) {
  forward_writes_.compare(kDdpName, model_.group);
  order_.times.begin(index);
  if (options_.comm_hook) return call_hook(index);
  const auto feedback = wire_->scope(index);
  auto group = wire_->group(index);
  started_.push_back(
      {index,
       group.all_reduce_async(reducer_->buckets()[index].flat, 1.0 / divisor_, tag(index)),
       {}});
}

void DdpReduction::call_hook(size_t index) {
  const auto& bucket = reducer_->buckets()[index];
  // To a hook, complex numbers are pairs of real ones.
  const auto real = [](const at::Tensor& tensor) {
    return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  };
  GradientBucket gradients{index, real(bucket.flat).view({-1}), {}, {}};
  for (const auto& view : bucket.views) gradients.gradients.push_back(real(view));
  for (const auto i : bucket.members) gradients.names.push_back(model_.trainable[i].name);
  // The collectives of a hook are its own, in both of its parts.
  const comm::TagScope start(tag(index));
  // It averages over all ranks; a join may divide by another number.
  const double scale = static_cast<double>(model_.group.size()) / divisor_;
  started_.push_back({index,
                      {},
                      [wait = options_.comm_hook(model_.group, gradients), tag = tag(index),
                       flat = bucket.flat, scale] {
                        const comm::TagScope end(tag);
                        wait();
                        if (scale != 1) flat.mul_(scale);
                      }});
}

void DdpReduction::finish() {
  model_.check_followed();
  if (reducer_->arrived().size() < model_.trainable.size()) model_.check_same_parameters();
  for (const auto index : std::exchange(complete_, {})) reduce(index);
  if (!in_background_) return wait_for_buckets();
  for (auto& [bucket, work, none] : std::exchange(started_, {}))
    reducer_->arrives_with(bucket, std::move(work));
}

void DdpReduction::abandon() {
  complete_.clear();
  wait();
}

void DdpReduction::wait_for_buckets() {
  for (auto& [bucket, work, finish] : std::exchange(started_, {})) finish ? finish() : work.wait();
}

/// Ranks that have made different numbers of passes reduce gradients of different steps: the tags
/// of the reductions then differ, which is an error on every rank.
std::string DdpReduction::tag(size_t bucket) const {
  return fmt::format(
      "bucket {} of backward {}, after {} forward passes: {}", bucket, backwards_ + 1, forwards_,
      sharding::first_to_last(model_.trainable, reducer_->buckets()[bucket].members));
}

/// All ranks are at the end of the same synchronising backward.
void DdpReduction::finished() {
  ++backwards_;
  uncommitted_ = true;
  const bool last = order_.stage == BucketOrder::Stage::last;
  if (!in_background_ || !last) wait();
  const double share = order_.times.share_in_backward();
  if (model_.module.is_training()) model_.synchronize_buffers();
  if (order_.stage == BucketOrder::Stage::of_parameters) order_by_arrival();
  else if (!last) order_for_next_forward(share);
}

/// After the first backward pass: the order in which the gradients of rank 0 (during a join, of an
/// active rank) arrived. Collective.
void DdpReduction::order_by_arrival() {
  std::string mine;
  for (const auto i : reducer_->arrival_order()) mine += std::to_string(i) + " ";
  const auto theirs = model_.group.broadcast_bytes(mine, publisher_);
  order_.arrival.clear();
  for (size_t at = 0; at < theirs.size(); at = theirs.find(' ', at) + 1)
    order_.arrival.push_back(std::stoul(theirs.substr(at)));
  wire_->reset();
  reducer_->replace_buckets(make_buckets());
  // The rounding of a bucket must not depend on measured times.
  const bool exact = options_.wire.gradients == WireFormat::float32;
  order_.stage =
      in_background_ && exact ? BucketOrder::Stage::of_arrival : BucketOrder::Stage::last;
}

/// After the second one: [Note: order of reductions], by the times of the same rank, if it steps in
/// the background. Collective.
void DdpReduction::order_for_next_forward(double share) {
  order_.stage = BucketOrder::Stage::last;
  // One bucket more than the share, because a wire that waits costs more than a late bucket.
  const double mine = share + 1.0 / static_cast<double>(reducer_->buckets().size());
  const int permille =
      updates_ && updates_->used() ? std::max(1, static_cast<int>(1000 * mine)) : 1000;
  order_.share_in_backward =
      std::stoi(model_.group.broadcast_bytes(std::to_string(permille), publisher_)) / 1000.0;
  if (order_.share_in_backward < 1) reducer_->replace_buckets(make_buckets());
}

}  // namespace tessera
