#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "memory/heap.h"
#include "sharding/gradients/gradient_norm.h"
#include "tessera/error.h"
#include "zero/impl.h"

namespace tessera {

// [Note: two ways to update] Where the local optimizer is one of ours and the shards are float32 on
// the CPU, each run of the averaged gradient updates its elements while it is hot in cache,
// straight from the reduce-scatter. Else own segment of the average is kept in `reduced`, shards
// get windows of it as gradients, and the local optimizer steps. Both give the same bits.

struct ZeroRedundancyOptimizer::Impl::PendingUpdate {
  ShardBucket* bucket = nullptr;
  bool direct = false;
  bool track_norm = false;
  std::function<bool(size_t)> is_used;
  std::vector<RangeUpdate> ranges;  // one a shard; direct only
  size_t next = 0;                  // first shard that is not over yet
  double squares = 0;
};

bool ZeroRedundancyOptimizer::Impl::used(size_t parameter) const {
  return reducer_ ? reducer_->used(position_[parameter])
                  : parameters_[parameter].tensor.grad().defined();
}

bool ZeroRedundancyOptimizer::Impl::one_pass(const ShardBucket& bucket) const {
  if (!dynamic_cast<const FusedOptimizer*>(local_.get())) return false;
  return std::all_of(bucket.shards.begin(), bucket.shards.end(), [](const auto& shard) {
    return FusedOptimizer::supports_range(shard.tensor);
  });
}

at::Tensor ZeroRedundancyOptimizer::Impl::own_segment(ShardBucket& bucket) {
  if (!bucket.reduced.defined()) {
    const auto& first = parameters_[bucket.members[0]].tensor;
    bucket.reduced =
        at::empty({bucket.layout.counts()[group_.rank()]}, first.options().requires_grad(false));
  }
  return bucket.reduced;
}

/// A run of own segment's sum has arrived: update with it, or keep it.
void ZeroRedundancyOptimizer::Impl::consume(PendingUpdate& update, int64_t offset,
                                            const at::Tensor& run) {
  auto& bucket = *update.bucket;
  const double scale = 1.0 / divisor_;
  if (!update.direct) {
    auto kept = own_segment(bucket).narrow(0, offset, run.numel());
    kept.copy_(run);
    if (scale != 1) kept.mul_(scale);
    return;
  }
  if (update.ranges.empty()) {
    auto& fused = dynamic_cast<FusedOptimizer&>(*local_);
    for (const auto& shard : bucket.shards) {
      update.ranges.push_back(update.is_used(shard.parameter) ? fused.begin_update(shard.tensor)
                                                              : RangeUpdate());
    }
  }
  const auto* gradient = run.data_ptr<float>();
  const int64_t end = offset + run.numel();
  for (size_t p = update.next; p < bucket.shards.size() && bucket.shards[p].at < end; ++p) {
    const auto& shard = bucket.shards[p];
    const int64_t from = std::max(offset, shard.at), to = std::min(end, shard.at + shard.numel);
    if (update.ranges[p].kernel) {
      FusedOptimizer::update_range(update.ranges[p], from - shard.at, gradient + (from - offset),
                                   to - from, static_cast<float>(scale));
    }
    if (to == shard.at + shard.numel) update.next = p + 1;
  }
  if (update.track_norm) update.squares += sum_of_squares(gradient, run.numel()) * scale * scale;
}

void ZeroRedundancyOptimizer::Impl::reduce(size_t index, bool update_directly) {
  auto& bucket = buckets_[index];
  PendingUpdate update;
  update.bucket = &bucket;
  update.direct = update_directly;
  update.track_norm = track_norm_;
  update.is_used = [this](size_t parameter) { return used(parameter); };
  group_.reduce_scatter_each(
      reducer_->buckets()[index].flat, bucket.layout.counts(),
      [&](int64_t offset, const at::Tensor& run) { consume(update, offset, run); });
  norm_squares_ += update.squares;
}

/// `.grad` is averaged already: own shards' part of it.
void ZeroRedundancyOptimizer::Impl::take_gradients_of_caller(ShardBucket& bucket) {
  auto segment = own_segment(bucket);
  for (const auto& shard : bucket.shards) {
    const auto& parameter = parameters_[shard.parameter];
    auto grad = parameter.tensor.grad();
    auto kept = segment.narrow(0, shard.at, shard.numel);
    if (!grad.defined()) {
      kept.zero_();
      continue;
    }
    sharding::check_gradient(kName, parameter.name, grad, group_.rank());
    kept.copy_(
        sharding::in_memory_order(grad, parameter.tensor).narrow(0, shard.begin, shard.numel));
  }
}

/// What the reducer calls when this rank's gradients are complete and the ranks know which
/// parameters were used.
void ZeroRedundancyOptimizer::Impl::finish_reduction() {
  for (size_t b = 0; b < buckets_.size(); ++b) reduce(b, !want_shards_ && one_pass(buckets_[b]));
}

void ZeroRedundancyOptimizer::Impl::ensure_reduced() {
  at::NoGradGuard no_grad;
  if (options_.overlap_with_backward) {
    throw UsageError(prefix() +
                     ": backward has used the gradients up when overlap_with_backward is set, so "
                     "there is no norm to take and nothing to clip; do so without overlap");
  }
  check_reduced_is_current();
  if (reduced_) return;
  if (reducer_) {
    struct Want {
      bool& flag;
      explicit Want(bool& f) : flag(f) { flag = true; }
      ~Want() { flag = false; }
    } want(want_shards_);
    reducer_->flush();
    reduced_generation_ = reducer_->generation();
  } else {
    for (auto& bucket : buckets_) take_gradients_of_caller(bucket);
  }
  reduced_ = true;
}

void ZeroRedundancyOptimizer::Impl::check_reduced_is_current() const {
  if (reduced_ && reducer_ && reduced_generation_ != reducer_->generation()) {
    throw UsageError(prefix() +
                     ": a backward came between clipping (or grad_norm) and step(), so its "
                     "gradients would be lost; clip after the last backward");
  }
}

void ZeroRedundancyOptimizer::Impl::hand_out_gradients(ShardBucket& bucket,
                                                       const std::function<bool(size_t)>& is_used) {
  for (auto& shard : bucket.shards) {
    if (!is_used(shard.parameter)) continue;
    auto gradient = sharding::window(bucket.reduced, shard.at, shard.numel);
    if (shard.tensor.dim() != 1)
      gradient = sharding::window(bucket.reduced, shard.at, shard.tensor);
    shard.tensor.mutable_grad() = gradient;
  }
}

void ZeroRedundancyOptimizer::Impl::take_back_gradients(ShardBucket& bucket) {
  for (auto& shard : bucket.shards) shard.tensor.mutable_grad() = at::Tensor();
}

/// Overlap: called from within backward, in the order of the buckets; the update runs behind the
/// reduction on the group's thread.
void ZeroRedundancyOptimizer::Impl::send_bucket(size_t index) {
  auto& bucket = buckets_[index];
  if (index == 0) {
    if (!sent_.empty())
      throw UsageError(prefix() +
                       ": overlap_with_backward: a second backward before step(); put all but the "
                       "last of a step's into no_sync()");
    copy_options(true);
    sent_with_.clear();
    for (const auto& group : outer_.param_groups())
      sent_with_.push_back(get_options(group.options()));
  }
  auto update = std::make_shared<PendingUpdate>();
  update->bucket = &bucket;
  update->direct = one_pass(bucket);
  update->track_norm = track_norm_;
  at::Tensor flags;
  if (options_.find_unused_parameters) {
    std::vector<int> have;
    for (const auto i : bucket.members) have.push_back(reducer_->has_gradient(position_[i]));
    flags = at::tensor(have, at::kInt).to(group_.control_device());
    sent_.push_back(group_.all_reduce_async(flags));
  }
  update->is_used = [&bucket, flags](size_t parameter) {
    if (!flags.defined()) return true;
    const auto member =
        std::find(bucket.members.begin(), bucket.members.end(), parameter) - bucket.members.begin();
    return flags[member].item<int>() > 0;
  };
  sent_.push_back(group_.reduce_scatter_each_async(
      reducer_->buckets()[index].flat, bucket.layout.counts(),
      callback_guard_.guard([this, update](int64_t offset, const at::Tensor& run) {
        consume(*update, offset, run);
        if (offset + run.numel() < update->bucket->layout.counts()[group_.rank()]) return;
        if (update->direct) {
          norm_squares_ += update->squares;
          return;
        }
        if (track_norm_)
          norm_squares_ += at::sum(update->bucket->reduced.to(at::kDouble).square()).item<double>();
        hand_out_gradients(*update->bucket, update->is_used);
        local_->step();
        take_back_gradients(*update->bucket);
      })));
  if (bucket.parameters.defined())
    sent_.push_back(group_.all_gather_async(bucket.parameters, bucket.layout.counts()));
}

void ZeroRedundancyOptimizer::Impl::gather_all() {
  for (auto& bucket : buckets_) zero::gather_parameters(bucket, parameters_, group_);
  bump_versions();
}

/// Autograd then refuses a backward through values from before the update.
void ZeroRedundancyOptimizer::Impl::bump_versions() {
  for (const auto& bucket : buckets_) {
    for (const auto i : bucket.members) parameters_[i].tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void ZeroRedundancyOptimizer::Impl::copy_options(bool inwards) {
  for (size_t g = 0; g < local_->param_groups().size(); ++g) {
    auto& exposed = outer_.param_groups()[g];
    auto& local = local_->param_groups()[g];
    if (inwards) tessera::copy_options(exposed, local);
    else tessera::copy_options(local, exposed);
  }
}

/// With overlap the update has begun by then: what changes only before step() would be used by some
/// buckets, or by none.
void ZeroRedundancyOptimizer::Impl::check_options_since_backward() {
  for (size_t g = 0; g < std::min(sent_with_.size(), outer_.param_groups().size()); ++g) {
    const auto now = get_options(outer_.param_groups()[g].options());
    const auto changed = std::find_if(now.begin(), now.end(), [&](const auto& option) {
      const auto before = sent_with_[g].find(option.first);
      return before == sent_with_[g].end() || before->second != option.second;
    });
    if (changed == now.end()) continue;
    group_.fail(
        fmt::format("{}: overlap_with_backward: option {} of group {} has changed since backward, "
                    "which has updated with the value of then; expected options to be set before "
                    "forward, or after step()",
                    prefix(), changed->first, g));
  }
}

void ZeroRedundancyOptimizer::Impl::check_storage() {
  for (const auto& [parameter, data] : placed_at_) {
    if (parameters_[parameter].tensor.data_ptr() == data) continue;
    group_.fail(
        fmt::format("{}: parameter {} has other storage than at construction (set_data, or "
                    "module->to(…)?); construct the optimizer after such changes, and "
                    "copy values in place",
                    prefix(), parameters_[parameter].name));
  }
}

at::Tensor ZeroRedundancyOptimizer::Impl::step(const LossClosure& closure) {
  at::Tensor loss;
  if (closure && !element_wise_) return step_with_closure(closure);
  if (closure) {
    at::AutoGradMode with_grad(true);
    loss = closure();
  }
  at::NoGradGuard no_grad;
  check_storage();
  if (options_.overlap_with_backward) {
    if (!sent_.empty()) check_options_since_backward();
    if (sent_.empty() && reducer_) reducer_->flush();  // every backward was under no_sync
    auto sent = std::exchange(sent_, {});
    for (auto& work : sent) work.wait();
    for (auto& bucket : buckets_) {
      if (!bucket.parameters.defined()) zero::gather_parameters(bucket, parameters_, group_);
    }
    bump_versions();
    if (reducer_) reducer_->zero_grad(true);  // they were this rank's own, and are used up
    repartition_if_trainability_changed();
  } else {
    repartition_if_trainability_changed();
    copy_options(true);
    check_reduced_is_current();
    // The optimizer is about to make its state, which stays: not between holes that the first
    // backward has left.
    if (!std::exchange(trimmed_, true)) memory::return_freed_memory();
    if (!reduced_) {
      norm_squares_ = 0;
      if (reducer_) reducer_->flush();
      else ensure_reduced();
    }
    const bool all_in_shards = std::exchange(reduced_, false);
    for (auto& bucket : buckets_) {
      if (all_in_shards || !one_pass(bucket)) {
        if (track_norm_)
          norm_squares_ += at::sum(own_segment(bucket).to(at::kDouble).square()).item<double>();
        own_segment(bucket);
        hand_out_gradients(bucket, [this](size_t parameter) { return used(parameter); });
      }
    }
    local_->step();
    for (auto& bucket : buckets_) take_back_gradients(bucket);
    gather_all();
  }
  copy_options(false);
  if (track_norm_) {
    auto sum = at::full({1}, std::exchange(norm_squares_, 0),
                        at::TensorOptions().dtype(at::kDouble).device(group_.control_device()));
    group_.all_reduce(sum);
    last_norm_ = std::sqrt(sum.item<double>());
  }
  return loss;
}

/// Optimizers that evaluate the loss as often as they like, each rank its own number of times: all
/// take part in every evaluation until the last has enough.
at::Tensor ZeroRedundancyOptimizer::Impl::step_with_closure(const LossClosure& closure) {
  repartition_if_trainability_changed();
  copy_options(true);
  at::Tensor first_loss;
  const auto evaluate = [&] {
    {
      at::NoGradGuard no_grad;
      gather_all();
    }
    at::Tensor loss;
    {
      at::AutoGradMode with_grad(true);
      loss = closure();
    }
    at::NoGradGuard no_grad;
    reduced_ = false;
    ensure_reduced();
    for (auto& bucket : buckets_)
      hand_out_gradients(bucket, [this](size_t parameter) { return used(parameter); });
    auto mean = loss.detach().clone();
    group_.all_reduce(mean, 1.0 / group_.size());
    if (!first_loss.defined()) first_loss = mean;
    return mean;
  };
  const auto anybody = [&](bool me) {
    auto count = at::full({1}, me ? 1 : 0,
                          at::TensorOptions().dtype(at::kInt).device(group_.control_device()));
    group_.all_reduce(count);
    return count.item<int>() > 0;
  };
  const bool any_shard = std::any_of(buckets_.begin(), buckets_.end(),
                                     [](const auto& bucket) { return !bucket.shards.empty(); });
  if (any_shard) {
    local_->step([&] {
      anybody(true);
      return evaluate();
    });
  }
  while (anybody(false)) evaluate();
  at::NoGradGuard no_grad;
  for (auto& bucket : buckets_) take_back_gradients(bucket);
  reduced_ = false;
  gather_all();
  copy_options(false);
  return first_loss;
}

void ZeroRedundancyOptimizer::Impl::zero_grad(bool set_to_none) {
  reduced_ = false;
  for (auto& parameter : parameters_) {
    auto& grad = parameter.tensor.mutable_grad();
    if (!grad.defined()) continue;
    if (set_to_none) grad = at::Tensor();
    else grad.zero_();
  }
}

/// A rank without data, while the others are in a backward. Gradients that somebody else averages
/// are left as they are.
void ZeroRedundancyOptimizer::Impl::shadow_backward() {
  if (!reducer_) return;
  if (options_.overlap_with_backward) reducer_->shadow();
  else zero_grad(true);
}

double ZeroRedundancyOptimizer::Impl::grad_norm(double p) {
  sharding::GradientNorm norm(prefix(), p);
  at::NoGradGuard no_grad;
  repartition_if_trainability_changed();
  ensure_reduced();
  for (auto& bucket : buckets_) norm.add(own_segment(bucket));
  return norm.total(group_);
}

double ZeroRedundancyOptimizer::Impl::clip(double max_norm, double p) {
  sharding::check_max_norm(prefix(), max_norm);
  const double norm = grad_norm(p);
  const double factor = clip_factor(max_norm, norm);
  if (factor == 1) return norm;
  at::NoGradGuard no_grad;
  for (auto& bucket : buckets_) own_segment(bucket).mul_(factor);
  return norm;
}

void ZeroRedundancyOptimizer::Impl::clip_value(double clip_value) {
  sharding::check_clip_value(prefix(), clip_value);
  at::NoGradGuard no_grad;
  repartition_if_trainability_changed();
  ensure_reduced();
  for (auto& bucket : buckets_) own_segment(bucket).clamp_(-clip_value, clip_value);
}

}  // namespace tessera
