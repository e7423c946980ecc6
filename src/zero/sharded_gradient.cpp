#include "zero/sharded_gradient.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "zero/local_optimizer.h"

namespace tessera::zero {

ShardedGradient::ShardedGradient(ProcessGroup group, sharding::GradientWire& wire, Shards& shards,
                                 const ZeroRedundancyOptimizerOptions& options, std::string prefix)
    : MeanGradient(std::move(group), wire, shards, options, std::move(prefix)), sums_(wire) {}

void ShardedGradient::add_to(sharding::ReducerOptions& options, bool first) {
  options.begin_before_first = true;
  held_ = !first;  // a gradient that came before its parameter was watched
}

void ShardedGradient::watched(const std::vector<sharding::NamedTensor>& trainable, bool /*first*/) {
  placeholders_ = std::make_unique<sharding::GradientPlaceholders>(
      trainable, prefix_,
      "optimizer.clip_grad_norm_(…), optimizer.zero_grad(), or .grad() of optimizer.shards()",
      [this, subset = shards_.all_in_buckets()](size_t i) {
        clears_to_zero_ = true;
        zero_own_part(subset[i]);
      });
  show_placeholders();  // gradients from before a parameter group was added, or a layer thawed
}

void ShardedGradient::start(size_t b) {
  ++(sharding::BackwardWatch::in_backward() ? reductions.in_backward : reductions.in_step);
  sums_.send(b, shards_.buckets()[b], flat(b), segment(b), 1.0 / divisor);
  // On a device a window loses its memory before backward ends. A further gradient in it, which is
  // an error, gets memory of its own.
  if (!flat(b).device().is_cpu()) reducer_->forget(b);
}

void ShardedGradient::hide_placeholders() {
  if (!placeholders_) return;
  const auto subset = shards_.all_in_buckets();
  const bool had_any = sums_.any();
  placeholders_->notice([&](size_t i) {
    clears_to_zero_ = false;
    zero_own_part(subset[i]);
    sums_.set_unused(subset[i]);
    for (auto& bucket : shards_.buckets()) {
      for (auto& shard : bucket.shards)
        if (shard.parameter == subset[i]) shard.tensor.mutable_grad() = at::Tensor();
    }
  });
  if (had_any && !sums_.any()) wire_.end_step(false);
  placeholders_->take_away();
  // Another tensor as `.grad` of a shard, or none, would have no effect.
  for (size_t b = 0; b < shards_.buckets().size(); ++b) {
    for (const auto& shard : shards_.buckets()[b].shards) {
      if (!sums_.has_sum(b) || !sums_.used(shard.parameter) || shard.numel == 0) continue;
      const auto& grad = shard.tensor.grad();
      if (grad.defined() && grad.storage().is_alias_of(segment(b).storage()) &&
          grad.storage_offset() == segment(b).storage_offset() + shard.at)
        continue;
      group_.fail(fmt::format(
          "{}: shard_gradients: .grad of this rank's shard of parameter {} was {}, which would be "
          "ignored; expected changes in place, or optimizer.zero_grad()",
          prefix_, shards_.parameters()[shard.parameter].name,
          grad.defined() ? "replaced" : "cleared"));
    }
  }
}

void ShardedGradient::zero_own_part(size_t parameter) {
  const at::NoGradGuard no_grad;
  for (size_t b = 0; b < shards_.buckets().size(); ++b) {
    for (const auto& shard : shards_.buckets()[b].shards)
      if (shard.parameter == parameter && sums_.has_sum(b))
        segment(b).narrow(0, shard.at, shard.numel).zero_();
  }
}

/// `.grad` of the parameters is used up and becomes a placeholder, and `.grad` of own shards is the
/// mean so far.
void ShardedGradient::finished() {
  held_ = used_up_ = false;
  for (const auto i : shards_.all_in_buckets())
    if (reducer_->used(position_[i])) sums_.set_used(i);
  reducer_->zero_grad(true);
  for (size_t b = 0; b < shards_.buckets().size(); ++b) {
    LocalOptimizer::set_gradients(shards_.buckets()[b], segment(b),
                                  [this](size_t i) { return sums_.used(i); });
  }
  versions_ = versions();
  show_placeholders();
}

/// Grows with each write to the gradients of own shards.
uint64_t ShardedGradient::versions() {
  uint64_t sum = 0;
  for (const auto* shard : shards_.owned())
    if (const auto& gradient = shard->tensor.grad(); gradient.defined()) sum += gradient._version();
  return sum;
}

void ShardedGradient::show_placeholders() {
  for (const auto i : shards_.all_in_buckets())
    if (placeholders_ && sums_.used(i)) placeholders_->show(position_[i]);
}

void ShardedGradient::average() {
  const at::NoGradGuard no_grad;
  hide_placeholders();
  if (reducer_ && (held_ || !sums_.any())) reducer_->flush();
  for (const auto i : shards_.all_in_buckets()) {
    const auto& [name, tensor] = shards_.parameters()[i];
    if (!tensor.grad().defined() || is_shown(i)) continue;
    group_.fail(prefix_ + ": shard_gradients: parameter " + name +
                " has a gradient that no backward has reduced (was .grad set?); expected changes "
                "of .grad of shards()");
  }
  show_placeholders();
}

void ShardedGradient::hold_sync(int change) {
  if (change > 0) held_ = true;
  MeanGradient::hold_sync(change);
}

void ShardedGradient::clear(bool set_to_none) {
  clears_to_zero_ = !set_to_none;
  if (set_to_none) {
    if (placeholders_) placeholders_->take_away();
    sums_.clear();
  }
  for (size_t b = 0; b < shards_.buckets().size(); ++b) {
    if (set_to_none) LocalOptimizer::clear_gradients(shards_.buckets()[b]);
    if (set_to_none || !sums_.has_sum(b)) continue;
    LocalOptimizer::set_gradients(shards_.buckets()[b], segment(b).zero_(),
                                  [this](size_t i) { return sums_.used(i); });
  }
}

/// A rank without data does not call zero_grad(). Gradients that a step has used are cleared here,
/// in the way in which they were cleared the last time.
bool ShardedGradient::shadow() {
  hide_placeholders();
  if (used_up_) clear(!clears_to_zero_);
  reducer_->shadow();
  return true;
}

bool ShardedGradient::has_bucket(size_t b) const {
  const auto& members = shards_.buckets()[b].members;
  return std::any_of(members.begin(), members.end(), [this](size_t i) {
    return !is_shown(i) && shards_.parameters()[i].tensor.grad().defined();
  });
}

}  // namespace tessera::zero
