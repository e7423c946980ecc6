#include "zero/mean_gradient.h"

#include <algorithm>
#include <utility>

#include "sharding/bucket.h"
#include "sharding/detection/detection.h"
#include "tessera/error.h"
#include "zero/local_optimizer.h"

namespace tessera::zero {

MeanGradient::MeanGradient(ProcessGroup group, sharding::GradientWire& wire, bool early,
                           Shards& shards, const ZeroRedundancyOptimizerOptions& options,
                           std::string prefix)
    : divisor(group.size()),
      group_(std::move(group)),
      wire_(wire),
      shards_(shards),
      options_(options),
      prefix_(std::move(prefix)) {
  if (early) early_.emplace(wire);
  if (options_.shard_gradients) sums_.emplace(wire);
}

void MeanGradient::watch() {
  const bool first = segments_.empty();
  drop_early_sums();
  wire_.reset();
  if (!sums_) segments_.clear();
  segments_.resize(shards_.buckets().size());
  in_place_.assign(shards_.buckets().size(), 0);
  reducer_.reset();
  placeholders_.reset();
  const auto subset = shards_.all_in_buckets();
  if (!options_.reduce_gradients || subset.empty()) return;
  std::vector<sharding::NamedTensor> trainable;
  position_.assign(shards_.parameters().size(), 0);
  for (const auto i : subset) {
    position_[i] = trainable.size();
    trainable.push_back(shards_.parameters()[i]);
  }
  std::vector<sharding::Bucket> buckets;
  for (const auto& bucket : shards_.buckets()) {
    buckets.push_back(bucket.gradients);
    for (auto& member : buckets.back().members) member = position_[member];
  }
  sharding::ReducerOptions options;
  options.component = kName;
  options.reduce_in_backward = false;
  options.find_unused_parameters = true;
  options.own_norm =
      "the gradients are scaled by a norm of this rank's own gradients "
      "(torch::nn::utils::clip_grad_norm_ over the module's parameters?); expected "
      "optimizer.clip_grad_norm_(…), whose norm is that of the mean over the ranks";
  sharding::Reducer::Callbacks callbacks;
  if (early_) {
    options.provisional = true;
    callbacks.ready = [this](size_t b) {
      if (sharding::BackwardWatch::in_backward()) ++reductions.in_backward;
      early_->send(b, shards_.buckets()[b], flat(b), segment(b));
    };
    callbacks.changed = [this](size_t b) { return early_->changed(b, flat(b)); };
  }
  if (sums_) {
    held_ = !first;  // a gradient that came before its parameter was watched
    watch_sharded(trainable, options, callbacks);
  }
  reducer_ = std::make_unique<sharding::Reducer>(group_, std::move(trainable), std::move(buckets),
                                                 options, std::move(callbacks));
  if (early_ && first) reducer_->open_round();
}

/// [Note: sharded gradients]
void MeanGradient::watch_sharded(const std::vector<sharding::NamedTensor>& trainable,
                                 sharding::ReducerOptions& options,
                                 sharding::Reducer::Callbacks& callbacks) {
  options.reduce_in_backward = true;
  options.own_norm.clear();  // no `.grad` is left to take a norm of
  callbacks.ready = [this](size_t b) {
    ++(sharding::BackwardWatch::in_backward() ? reductions.in_backward : reductions.in_step);
    sums_->send(b, shards_.buckets()[b], flat(b), segment(b), 1.0 / divisor);
    // On a device a window loses its memory before backward ends. A further gradient in it, which
    // is an error, gets memory of its own.
    if (!flat(b).device().is_cpu()) reducer_->forget(b);
  };
  callbacks.finish = callbacks.drain = [this] { sums_->wait(); };
  callbacks.finished = [this] { publish_means(); };
  callbacks.began = [this] { hide_placeholders(); };
  placeholders_ = std::make_unique<sharding::GradientPlaceholders>(
      trainable, prefix_,
      "optimizer.clip_grad_norm_(…), optimizer.zero_grad(), or .grad() of optimizer.shards()",
      [this, subset = shards_.all_in_buckets()](size_t i) {
        clears_to_zero_ = true;
        zero_own_part(subset[i]);
      });
}

void MeanGradient::hide_placeholders() {
  if (!placeholders_) return;
  const auto subset = shards_.all_in_buckets();
  const bool had_any = sums_->any();
  placeholders_->notice([&](size_t i) {
    clears_to_zero_ = false;
    zero_own_part(subset[i]);
    sums_->set_unused(subset[i]);
    for (auto& bucket : shards_.buckets()) {
      for (auto& shard : bucket.shards) {
        if (shard.parameter == subset[i]) shard.tensor.mutable_grad() = at::Tensor();
      }
    }
  });
  if (had_any && !sums_->any()) wire_.end_step(false);
  placeholders_->take_away();
}

void MeanGradient::zero_own_part(size_t parameter) {
  const at::NoGradGuard no_grad;
  for (size_t b = 0; b < shards_.buckets().size(); ++b) {
    for (const auto& shard : shards_.buckets()[b].shards) {
      if (shard.parameter == parameter && sums_->has_sum(b))
        segment(b).narrow(0, shard.at, shard.numel).zero_();
    }
  }
}

/// `.grad` of the parameters is used up and becomes a placeholder, and `.grad` of own shards is the
/// mean so far.
void MeanGradient::publish_means() {
  held_ = used_up_ = false;
  for (const auto i : shards_.all_in_buckets()) {
    if (reducer_->used(position_[i])) sums_->set_used(i);
  }
  reducer_->zero_grad(true);
  for (size_t b = 0; b < shards_.buckets().size(); ++b) {
    LocalOptimizer::set_gradients(shards_.buckets()[b], segment(b),
                                  [this](size_t i) { return sums_->used(i); });
  }
  show_placeholders();
}

void MeanGradient::show_placeholders() {
  for (const auto i : shards_.all_in_buckets()) {
    if (placeholders_ && sums_->used(i)) placeholders_->show(position_[i]);
  }
}

/// Adds what no_sync() has held back. Without a backward since the last step, also what the caller
/// has set.
void MeanGradient::reduce_held() {
  hide_placeholders();
  if (reducer_ && (held_ || !sums_->any())) reducer_->flush();
  for (const auto i : shards_.all_in_buckets()) {
    const auto& [name, tensor] = shards_.parameters()[i];
    if (!tensor.grad().defined() || (placeholders_ && placeholders_->shown(position_[i]))) continue;
    group_.fail(prefix_ + ": shard_gradients: parameter " + name +
                " has a gradient that no backward has reduced (was .grad set?); expected changes "
                "of .grad of shards()");
  }
  show_placeholders();
}

void MeanGradient::hold_sync(int change) {
  if (change > 0) held_ = true;
  if (reducer_) reducer_->hold_sync(change);
}

at::Tensor MeanGradient::early_sum(size_t b) {
  if (!early_ || reducer_->changed(b)) {
    ++reductions.in_step;
    return {};
  }
  early_->wait(b);
  return segment(b);
}

void MeanGradient::begin_round() {
  if (!early_ || !reducer_) return;
  bool any_changed = false;
  for (size_t b = 0; b < shards_.buckets().size(); ++b) any_changed |= reducer_->changed(b);
  if (early_->next_round(any_changed)) reducer_->open_round();
}

void MeanGradient::drop_early_sums() {
  if (!early_ || !reducer_) return;
  reducer_->close_round();
  early_->drain();
}

void MeanGradient::check_current() const {
  if (sums_) return;  // a later backward adds to the mean
  if (state_ == State::averaged && reducer_ && generation_ != reducer_->generation()) {
    throw UsageError(prefix_ +
                     ": a backward came between clipping (or grad_norm) and step(), so its "
                     "gradients would be lost; clip after the last backward");
  }
}

void MeanGradient::require_local(const std::string& change) const {
  if (state_ == State::local || sums_) return;
  throw UsageError(prefix_ + ": " + change +
                   " between clipping (or grad_norm) and step(), which would lose the averaged "
                   "gradient; expected before backward, or after step()");
}

void MeanGradient::reset() {
  state_ = State::local;
  used_up_ = true;
  for (size_t b = 0; b < segments_.size(); ++b) {
    if (std::exchange(in_place_[b], 0)) segments_[b] = at::Tensor();
  }
}

void MeanGradient::clear_shards(bool set_to_none) {
  if (!sums_) return;
  clears_to_zero_ = !set_to_none;
  if (set_to_none) {
    if (placeholders_) placeholders_->take_away();
    sums_->clear();
  }
  for (size_t b = 0; b < shards_.buckets().size(); ++b) {
    if (set_to_none) LocalOptimizer::clear_gradients(shards_.buckets()[b]);
    else if (sums_->has_sum(b)) segment(b).zero_();
  }
}

void MeanGradient::collect() {
  if (reducer_) reducer_->collect();
}

void MeanGradient::return_gradients() {
  if (!reducer_) return;
  reducer_->return_gradients();
  for (size_t b = 0; b < in_place_.size(); ++b) {
    for (const auto& shard : shards_.buckets()[b].shards) {
      if (in_place_[b] && shard.numel > 0) reducer_->mark_overwritten(position_[shard.parameter]);
    }
  }
}

void MeanGradient::reduce_to_segment(size_t b) {
  if (auto sum = early_sum(b); sum.defined()) {
    const double rest = 1 / (divisor * early_->scale(sum));
    if (rest != 1) sum.mul_(rest);
    early_->forget(b);
    return;
  }
  if (early_) early_->wait(b);  // it writes to the segment
  if (in_buckets_) {
    // A rank's own segment of its bucket is read by this rank alone, run by run, so the mean of
    // each run can replace what it was summed from.
    const auto& layout = shards_.buckets()[b].layout;
    const int rank = group_.rank();
    segments_[b] = sharding::window(flat(b), layout.segment_begin(rank), layout.counts()[rank]);
    in_place_[b] = 1;
  }
  const auto feedback = wire_.scope(b);
  ProcessGroup(wire_.group(b))
      .reduce_scatter_each(
          flat(b), shards_.buckets()[b].layout.counts(),
          [&](int64_t offset, const at::Tensor& run) { keep(b, offset, run); }, 1.0 / divisor,
          "gradients of " + shards_.buckets()[b].names);
}

void MeanGradient::average() {
  at::NoGradGuard no_grad;
  if (sums_) {
    reduce_held();
    state_ = State::averaged;
    return;
  }
  check_current();
  if (state_ == State::averaged) return;
  if (reducer_) reducer_->collect();
  for (size_t b = 0; b < shards_.buckets().size(); ++b) {
    if (reducer_) reduce_to_segment(b);
    else copy_from_caller(b);
  }
  return_gradients();
  if (reducer_) generation_ = reducer_->generation();
  state_ = State::averaged;
}

/// `.grad` is averaged already: own shards' part of it.
void MeanGradient::copy_from_caller(size_t b) {
  auto own = segment(b);
  for (const auto& shard : shards_.buckets()[b].shards) {
    const auto& parameter = shards_.parameters()[shard.parameter];
    const auto grad = parameter.tensor.grad();
    auto kept = own.narrow(0, shard.at, shard.numel);
    if (!grad.defined()) {
      kept.zero_();
      continue;
    }
    sharding::check_gradient(kName, parameter.name, grad, group_.rank());
    kept.copy_(
        sharding::in_memory_order(grad, parameter.tensor).narrow(0, shard.begin, shard.numel));
  }
}

void MeanGradient::keep(size_t b, int64_t offset, const at::Tensor& run) {
  segment(b).narrow(0, offset, run.numel()).copy_(run);
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

bool MeanGradient::used(size_t parameter) const {
  if (sums_) return sums_->used(parameter);
  return reducer_ ? reducer_->used(position_[parameter])
                  : shards_.parameters()[parameter].tensor.grad().defined();
}

int64_t MeanGradient::bytes() const {
  int64_t bytes = 0;
  for (size_t b = 0; b < shards_.buckets().size(); ++b) {
    const auto& members = shards_.buckets()[b].members;
    const bool filled = !sums_ || std::any_of(members.begin(), members.end(), [this](size_t i) {
      if (placeholders_ && placeholders_->shown(position_[i])) return false;
      return shards_.parameters()[i].tensor.grad().defined();
    });
    if (options_.reduce_gradients && filled) bytes += shards_.buckets()[b].gradients.bytes();
    if (segments_[b].defined() && !in_place_[b])
      bytes += static_cast<int64_t>(segments_[b].nbytes());
  }
  return bytes;
}

}  // namespace tessera::zero
