#include "zero/step_gradient.h"

#include <utility>

#include "sharding/bucket.h"
#include "sharding/detection/detection.h"
#include "tessera/error.h"

namespace tessera::zero {

StepGradient::StepGradient(ProcessGroup group, sharding::GradientWire& wire, bool early,
                           Shards& shards, const ZeroRedundancyOptimizerOptions& options,
                           std::string prefix)
    : MeanGradient(std::move(group), wire, shards, options, std::move(prefix)) {
  if (early) early_.emplace(wire);
}

void StepGradient::drop_sums() {
  in_place_.assign(shards_.buckets().size(), 0);
  if (early_ && reducer_) {
    reducer_->close_round();
    early_->drain();
  }
  segments_.clear();
}

void StepGradient::add_to(sharding::ReducerOptions& options, bool /*first*/) {
  options.reduce_in_backward = false;
  options.provisional = early_.has_value();
  options.begin_before_first = true;
  options.own_norm =
      "the gradients are scaled by a norm of this rank's own gradients "
      "(torch::nn::utils::clip_grad_norm_ over the module's parameters?); expected "
      "optimizer.clip_grad_norm_(…), whose norm is that of the mean over the ranks";
}

void StepGradient::watched(const std::vector<sharding::NamedTensor>& /*trainable*/, bool first) {
  if (early_ && first) reducer_->open_round();
}

void StepGradient::start(size_t b) {
  if (sharding::BackwardWatch::in_backward()) ++reductions.in_backward;
  early_->send(b, shards_.buckets()[b], flat(b), segment(b));
}

/// The sum of bucket `b`, times EarlyReduction::scale(), as it was taken within backward; undefined
/// if there is none, or if the gradients have changed since.
at::Tensor StepGradient::early_sum(size_t b) {
  if (!early_) {
    ++reductions.in_step;
    return {};
  }
  const bool changed = reducer_->changed(b);
  early_->wait(b);  // it writes to the segment
  if (changed) ++reductions.in_step;
  return changed ? at::Tensor() : segment(b);
}

void StepGradient::begin_round() {
  if (!early_ || !reducer_) return;
  bool any_changed = false;
  for (size_t b = 0; b < shards_.buckets().size(); ++b) any_changed |= reducer_->changed(b);
  if (early_->next_round(any_changed)) reducer_->open_round();
}

void StepGradient::begin() {
  if (!averaged_) return;
  follow_changes();
  outdated_ = averaged_;
}

/// What the program has done to `.grad`s since they were averaged. If it has cleared all of them,
/// as net->zero_grad() does, the mean is given up. Otherwise returns the name of one that changed.
std::string StepGradient::follow_changes() {
  std::optional<sharding::NoDetection> no_detection;
  if (reducer_) no_detection.emplace();  // otherwise a gradient may be one that has not arrived
  const at::NoGradGuard no_grad;
  std::string changed;
  bool any_differs = false, all_cleared = true;
  const auto subset = shards_.all_in_buckets();
  for (size_t n = 0; n < averaged_from_.size(); ++n) {
    const auto& [name, tensor] = shards_.parameters()[subset[n]];
    const auto& [before, version] = averaged_from_[n];
    const auto& now = tensor.grad();
    // Where the mean may replace own gradients, clipping changes their versions, too.
    const bool same =
        now.is_same(before) && (!now.defined() || in_buckets_ || now._version() == version);
    any_differs = any_differs || !same;
    all_cleared = all_cleared && (!now.defined() || (!same && now.layout() == at::kStrided &&
                                                     at::count_nonzero(now).item<int64_t>() == 0));
    const bool noticed_by_step = !reducer_ && !now.defined();  // see used()
    if (!same && !noticed_by_step && changed.empty()) changed = name;
  }
  if (!any_differs || !all_cleared) return changed;
  reset();
  wire_.end_step(false);
  return "";
}

void StepGradient::check_current() {
  if (!averaged_) return;
  if (outdated_)
    throw UsageError(
        prefix_ +
        ": a backward came between clipping (or grad_norm) and step(), so its gradients would be "
        "lost; clip after the last backward");
  if (const auto changed = follow_changes(); !changed.empty())
    group_.fail(prefix_ + ": .grad of parameter " + changed +
                " was changed between clipping (or grad_norm) and step(), which uses the mean that "
                "was taken for clipping; expected changes before it, or zero_grad()");
}

void StepGradient::require_local(const std::string& change) const {
  if (!averaged_) return;
  throw UsageError(prefix_ + ": " + change +
                   " between clipping (or grad_norm) and step(), which would lose the averaged "
                   "gradient; expected before backward, or after step()");
}

void StepGradient::reset() {
  averaged_ = outdated_ = false;
  averaged_from_.clear();
  for (size_t b = 0; b < segments_.size(); ++b)
    if (std::exchange(in_place_[b], 0)) segments_[b] = at::Tensor();
}

void StepGradient::begin_update() {
  check_current();
  if (!options_.reduce_gradients) return average();
  if (!averaged_ && reducer_) reducer_->collect();
}

void StepGradient::end_update() {
  if (!reducer_) return;
  reducer_->return_gradients();
  for (size_t b = 0; b < in_place_.size(); ++b) {
    for (const auto& shard : shards_.buckets()[b].shards)
      if (in_place_[b] && shard.numel > 0) reducer_->mark_overwritten(position_[shard.parameter]);
  }
}

void StepGradient::reduce(size_t b,
                          const std::function<void(int64_t, const at::Tensor&)>& consume) {
  if (const auto sum = early_sum(b); sum.defined()) return consume(0, sum);
  const auto feedback = wire_.scope(b);
  ProcessGroup(wire_.group(b))
      .reduce_scatter_each(flat(b), shards_.buckets()[b].layout.counts(), consume, 1,
                           "gradients of " + shards_.buckets()[b].names);
}

void StepGradient::reduce_to_segment(size_t b) {
  if (auto sum = early_sum(b); sum.defined()) {
    const double rest = 1 / (divisor * early_->scale(sum));
    if (rest != 1) sum.mul_(rest);
    early_->forget(b);
    return;
  }
  if (in_buckets_) {
    // A rank's own segment of its bucket is read by this rank alone, run by run, so the mean of
    // each run can replace this rank's values of the run.
    const auto& layout = shards_.buckets()[b].layout;
    const int rank = group_.rank();
    segments_[b] = sharding::window(flat(b), layout.segment_begin(rank), layout.counts()[rank]);
    in_place_[b] = 1;
  }
  const auto feedback = wire_.scope(b);
  ProcessGroup(wire_.group(b))
      .reduce_scatter_each(
          flat(b), shards_.buckets()[b].layout.counts(),
          [&](int64_t offset, const at::Tensor& run) {
            segment(b).narrow(0, offset, run.numel()).copy_(run);
          },
          1.0 / divisor, "gradients of " + shards_.buckets()[b].names);
}

void StepGradient::average() {
  at::NoGradGuard no_grad;
  check_current();
  if (averaged_) return;
  if (reducer_) reducer_->collect();
  for (size_t b = 0; b < shards_.buckets().size(); ++b)
    if (reducer_) reduce_to_segment(b);
    else copy_from_caller(b);
  end_update();
  averaged_from_.clear();
  for (const auto i : shards_.all_in_buckets()) {
    const auto& grad = shards_.parameters()[i].tensor.grad();
    averaged_from_.emplace_back(grad, grad.defined() ? grad._version() : 0);
  }
  averaged_ = true;
}

/// `.grad` is averaged already: own shards' part of it.
void StepGradient::copy_from_caller(size_t b) {
  auto own = segment(b);
  for (const auto& shard : shards_.buckets()[b].shards) {
    const auto& parameter = shards_.parameters()[shard.parameter];
    auto grad = parameter.tensor.grad();
    auto kept = own.narrow(0, shard.at, shard.numel);
    if (!grad.defined()) {
      kept.zero_();
      continue;
    }
    grad = sharding::dense_gradient(kName, parameter.name, grad, group_.rank());
    kept.copy_(
        sharding::in_memory_order(grad, parameter.tensor).narrow(0, shard.begin, shard.numel));
  }
}

bool StepGradient::used(size_t parameter) const {
  return reducer_ ? reducer_->used(position_[parameter])
                  : shards_.parameters()[parameter].tensor.grad().defined();
}

}  // namespace tessera::zero
