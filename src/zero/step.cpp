#include <algorithm>

#include <fmt/format.h>

#include "memory/heap.h"
#include "sharding/gradients/gradient_norm.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "zero/bucket_update.h"
#include "zero/impl.h"

namespace tessera {
namespace {

/// True if every rank, whatever it owns of the bucket, can update it in one pass. Unlike
/// LocalOptimizer::one_pass(), the same on all ranks.
bool one_pass_everywhere(const zero::ShardBucket& bucket,
                         const std::vector<sharding::NamedTensor>& parameters,
                         Partition partition) {
  return std::all_of(bucket.members.begin(), bucket.members.end(), [&](size_t i) {
    const auto& parameter = parameters[i].tensor;
    return parameter.scalar_type() == at::kFloat && parameter.device().is_cpu() &&
           (partition == Partition::flat || parameter.is_contiguous());
  });
}

}  // namespace

at::Tensor ZeroRedundancyOptimizer::Impl::step(const LossClosure& closure) {
  if (closure && !local.element_wise()) return step_with_closure(closure);
  at::Tensor loss;
  if (closure) loss = call(closure);
  shards.wait_for_gathers();  // of a parameter that nothing has used since
  at::NoGradGuard no_grad;
  check_groups();
  check_storage();
  prepare_step();
  mean->begin_update();
  update(mean->averaged());
  gradients.commit();
  gradients.end_step(true);
  local.give_options_to(outer_);
  norm.finish(group);
  synchronize_buffers();
  if (plan.in_background) shards.gather_in_background(option_text());
  return loss;
}

/// The closure's loss. The other ranks wait for this one in collectives, so they must know of an
/// exception.
at::Tensor ZeroRedundancyOptimizer::Impl::call(const LossClosure& closure) {
  at::AutoGradMode with_grad(true);
  try {
    return closure();
  } catch (const BrokenWorldError&) {
    throw;
  } catch (const std::exception& error) {
    if (group.size() > 1 && !group.ended()) {
      try {
        group.fail(fmt::format("{}: the closure of step() threw: {}", prefix(), message_of(error)));
      } catch (const Error&) {  // this rank's own exception says more
      }
    }
    throw;
  }
}

/// Updates the shards with the collected or averaged gradients, and gathers them.
void ZeroRedundancyOptimizer::Impl::update(bool averaged) {
  const auto tag = option_text();
  // Where no reduction comes before the first write.
  if (shards.shares() && (averaged || plan.early || shards.wire()))
    shards.shared()->wait_for_readers();
  shards.restore();
  for (size_t b = 0; b < shards.buckets().size(); ++b) {
    auto* const fused = averaged ? nullptr : local.one_pass(shards.buckets()[b]);
    if (fused) {
      reduce_and_update(b, *fused);
      // The order of the gathers must be that of all ranks.
      if (plan.early && !plan.in_background &&
          one_pass_everywhere(shards.buckets()[b], shards.parameters(), options.partition))
        shards.begin_gather(b, tag);
    } else {
      set_gradients(b, averaged);
    }
  }
  if (!averaged) own_gradients->end_update();
  local.get().step();  // updates the shards that have a gradient: not those updated above
  clear_shard_gradients();
  mean->reset();
  if (own_gradients) own_gradients->begin_round();
  shards.gather(tag, !plan.in_background);
}

void ZeroRedundancyOptimizer::Impl::prepare_step() {
  follow_trainability();
  local.take_options_of(outer_);
  norm.begin();
  // The first step allocates the optimizer's state, which stays. The memory that the first backward
  // has freed is returned before, so that the state does not end up in holes of the heap.
  if (!std::exchange(stepped_, true)) memory::return_freed_memory();
}

/// Updates the bucket's shards with the mean gradient, run by run, as the reduce-scatter sums it.
void ZeroRedundancyOptimizer::Impl::reduce_and_update(size_t b, FusedOptimizer& optimizer) {
  const auto& bucket = shards.buckets()[b];
  zero::BucketUpdate update(
      optimizer, bucket, [this](size_t i) { return mean->used(i); }, 1.0 / mean->divisor,
      norm.tracking);
  own_gradients->reduce(
      b, [&](int64_t offset, const at::Tensor& run) { update.consume(offset, run); });
  norm.squares += update.squares();
}

/// The bucket's shards get windows of the mean gradient as `.grad`, for the local optimizer.
void ZeroRedundancyOptimizer::Impl::set_gradients(size_t b, bool averaged) {
  if (!averaged) own_gradients->reduce_to_segment(b);
  const auto segment = mean->segment(b);
  norm.add(segment);
  local.set_gradients(shards.buckets()[b], segment, [this](size_t i) { return mean->used(i); });
}

/// For optimizers that evaluate the loss any number of times, which may differ between ranks: all
/// ranks join every evaluation until the last rank needs no more.
at::Tensor ZeroRedundancyOptimizer::Impl::step_with_closure(const LossClosure& closure) {
  check_groups();
  check_storage();
  follow_trainability();
  local.take_options_of(outer_);
  at::Tensor first_loss;
  const auto evaluate_once = [&] {
    auto loss = evaluate(closure);
    if (!first_loss.defined()) first_loss = loss;
    return loss;
  };
  const auto any_rank_evaluates = [&](bool mine) {
    auto count = at::full({1}, mine ? 1 : 0,
                          at::TensorOptions().dtype(at::kInt).device(group.control_device()));
    group.all_reduce(count);
    return count.item<int>() > 0;
  };
  if (!shards.owned().empty()) {
    local.get().step([&] {
      any_rank_evaluates(true);
      return evaluate_once();
    });
  }
  while (any_rank_evaluates(false)) evaluate_once();
  at::NoGradGuard no_grad;
  clear_shard_gradients();
  mean->reset();
  shards.gather(option_text());
  gradients.commit();
  gradients.end_step(true);
  local.give_options_to(outer_);
  norm.finish(group);
  synchronize_buffers();
  return first_loss;
}

void ZeroRedundancyOptimizer::Impl::synchronize_buffers() {
  buffers.synchronize(group, has_data);
  if (std::exchange(no_module, false) && options.buffers != BufferSync::none &&
      !zero::is_reduced_by_ddp(shards.parameters()))
    sharding::report_no_module(kName, group);
}

/// The mean of the ranks' losses at current parameters; the shards have the averaged gradients.
at::Tensor ZeroRedundancyOptimizer::Impl::evaluate(const LossClosure& closure) {
  {
    at::NoGradGuard no_grad;
    clear_shard_gradients();
    shards.gather();
  }
  const auto loss = call(closure);
  at::NoGradGuard no_grad;
  norm.begin();
  mean->reset();
  mean->average();
  for (size_t b = 0; b < shards.buckets().size(); ++b) set_gradients(b, true);
  auto result = loss.detach().clone();
  group.all_reduce(result, 1.0 / group.size());
  return result;
}

/// With shard_gradients those of the shards are the user's, until zero_grad().
void ZeroRedundancyOptimizer::Impl::clear_shard_gradients() {
  if (options.shard_gradients) return;
  for (auto& bucket : shards.buckets()) zero::LocalOptimizer::clear_gradients(bucket);
}

void ZeroRedundancyOptimizer::Impl::zero_grad(bool set_to_none) {
  mean->reset();
  mean->clear(set_to_none);
  gradients.end_step(false);  // no effect after step()
  for (const auto& parameter : shards.parameters()) {
    auto tensor = parameter.tensor;
    auto& grad = tensor.mutable_grad();
    if (!grad.defined()) continue;
    if (set_to_none) grad = at::Tensor();
    else grad.detach_().zero_();
  }
}

/// On a rank without data, while the others are in a backward. Gradients that are averaged
/// elsewhere stay as they are.
void ZeroRedundancyOptimizer::Impl::shadow_backward() {
  if (mean->reducer() && !mean->shadow()) zero_grad(true);
}

void ZeroRedundancyOptimizer::Impl::average() {
  at::NoGradGuard no_grad;
  follow_trainability();
  mean->average();
}

GradNorm ZeroRedundancyOptimizer::Impl::clip(double max_norm, double p) {
  sharding::check_max_norm(prefix(), max_norm);
  sharding::GradientNorm total(prefix(), p);
  average();
  at::NoGradGuard no_grad;
  for (size_t b = 0; b < shards.buckets().size(); ++b) total.add(mean->segment(b));
  auto before = total.total(group, shards.buckets().empty() ? at::kCPU : mean->segment(0).device());
  const sharding::NormClip clip(max_norm, before);
  for (size_t b = 0; b < shards.buckets().size(); ++b) clip.scale(mean->segment(b));
  return GradNorm(std::move(before));
}

void ZeroRedundancyOptimizer::Impl::clip_value(double clip_value) {
  sharding::check_clip_value(prefix(), clip_value);
  average();
  at::NoGradGuard no_grad;
  for (size_t b = 0; b < shards.buckets().size(); ++b)
    mean->segment(b).clamp_(-clip_value, clip_value);
}

}  // namespace tessera
