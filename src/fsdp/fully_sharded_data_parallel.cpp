#include "tessera/fully_sharded_data_parallel.h"

#include <fmt/format.h>
#include <torch/optim/lbfgs.h>

#include "fsdp/paging/advice.h"
#include "fsdp/sharded_module.h"
#include "sharding/shard_state.h"
#include "tessera/error.h"

namespace tessera {

namespace detail {

ForwardScope::ForwardScope(fsdp::ShardedModule& sharded) : sharded_(sharded) {
  sharded_.begin_forward();
}

void ForwardScope::end() {
  ended_ = true;
  sharded_.end_forward(false);
}

void ForwardScope::explain(const c10::Error& error) const {
  if (!sharded_.full_precision())
    fsdp::advise_on_dtypes(error, sharded_.options.mixed_precision, sharded_.prefix());
}

ForwardScope::~ForwardScope() {
  if (!ended_) sharded_.end_forward(true);
}

}  // namespace detail

namespace {

NamedParameters shards_of(const fsdp::ShardedModule& sharded) {
  NamedParameters result;
  for (size_t i = 0; i < sharded.model.parameters.size(); ++i)
    result.emplace_back(sharded.model.parameters[i].name, sharded.model.shard_of(i).tensor);
  return result;
}

/// Refuses an optimizer that needs more of the parameters than this rank's shards.
void check_divisible(const fsdp::ShardedModule& sharded, const torch::optim::Optimizer& optimizer) {
  if (is_element_wise(optimizer) || sharded.model.shard_group.size() == 1) return;
  const std::string known =
      "SGD, Adam, AdamW, Adagrad, RMSprop, a class declared with "
      "declare_element_wise<YourOptimizer>(), ";
  if (sharded.options.partition == Partition::flat) {
    throw UsageError(
        sharded.prefix() +
        ": the optimizer is not known to be element-wise, but the shards are ranges of "
        "elements, on which any other optimizer would be silently wrong; expected " +
        known + "or, for one that takes parameters one by one, option partition whole");
  }
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer)) {
    throw UsageError(
        sharded.prefix() +
        ": LBFGS uses all parameters at once, but each rank holds only some of them; expected " +
        known + "or sharding_strategy no_shard");
  }
}

}  // namespace

FullyShardedDataParallelBase::FullyShardedDataParallelBase(torch::nn::Module& module,
                                                           ProcessGroup group, Options options)
    : sharded_(
          std::make_shared<fsdp::ShardedModule>(module, std::move(group), std::move(options))) {}

std::vector<at::Tensor> FullyShardedDataParallelBase::parameters() const {
  std::vector<at::Tensor> result;
  for (auto& [name, shard] : shards_of(*sharded_)) result.push_back(shard);
  return result;
}

NamedParameters FullyShardedDataParallelBase::named_parameters() const {
  return shards_of(*sharded_);
}

void FullyShardedDataParallelBase::check_optimizer(const torch::optim::Optimizer& optimizer) const {
  const auto& sharded = *sharded_;
  check_divisible(sharded, optimizer);
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& tensor : group.params()) {
      for (const auto& [name, own] : sharded.model.parameters) {
        if (!tensor.is_same(own)) continue;
        throw UsageError(
            fmt::format("{}: the optimizer has parameter {} of the module itself, which is not in "
                        "fsdp.parameters(): it is only a gathered copy, and the gradient is that "
                        "of the shard; expected this "
                        "rank's shards: Optimizer(fsdp.parameters(), …)",
                        sharded.prefix(), name));
      }
    }
  }
}

at::Tensor FullyShardedDataParallelBase::cast_input(const at::Tensor& input) const {
  if (!casts_inputs() || !input.defined() || !input.is_floating_point()) return input;
  const auto dtype = *sharded_->options.mixed_precision.param_dtype;
  return input.scalar_type() == dtype ? input : input.to(dtype);
}

bool FullyShardedDataParallelBase::casts_inputs() const {
  const auto& sharded = *sharded_;
  const auto& mixed = sharded.options.mixed_precision;
  return mixed.param_dtype && mixed.cast_forward_inputs && !sharded.full_precision();
}

GradNorm FullyShardedDataParallelBase::clip_grad_norm_(double max_norm, double norm_type) {
  return sharded_->clip(max_norm, norm_type);
}

void FullyShardedDataParallelBase::clip_grad_value_(double clip_value) {
  sharded_->clip_value(clip_value);
}

FullParams FullyShardedDataParallelBase::summon_full_params(const std::string& prefix,
                                                            bool writeback, bool rank0_only) {
  return FullParams(sharded_->shared_from_this(), prefix, writeback, rank0_only);
}

NoSync FullyShardedDataParallelBase::no_sync() {
  auto* gradients = sharded_->gradients.get();
  return NoSync([gradients](int change) { gradients->hold_sync(change); });
}

void FullyShardedDataParallelBase::zero_grad(bool set_to_none) {
  sharded_->require_idle("zero_grad");
  sharded_->gradients->zero_grad(set_to_none);
}

void FullyShardedDataParallelBase::end_step(StepEnd end) {
  sharded_->require_idle("end_step");
  sharding::check_scale_change(fsdp::kName, group().rank(), end.scale);
  sharded_->gradients->end_step(end);
}

void FullyShardedDataParallelBase::wait() { sharded_->gradients->wait(); }

void FullyShardedDataParallelBase::shadow_backward() { sharded_->shadow_backward(); }
void FullyShardedDataParallelBase::set_shadow_step(std::function<void()> step) {
  sharded_->step_of_shadow = std::move(step);
}
ProcessGroup FullyShardedDataParallelBase::join_group() const { return group(); }
void FullyShardedDataParallelBase::on_join_iteration(const JoinIteration& iteration) {
  sharded_->join_leader.begin_iteration(iteration);
  sharded_->buffers.set_active(iteration.first_active, iteration.active_ranks);
}
void FullyShardedDataParallelBase::shadow_step() { sharded_->shadow_step(); }
void FullyShardedDataParallelBase::finish_join(int last_active_rank) {
  sharded_->finish_join(last_active_rank);
}

std::vector<FsdpUnit> FullyShardedDataParallelBase::units() const {
  const auto& model = sharded_->model;
  std::vector<FsdpUnit> result;
  for (const auto& unit : model.units) {
    FsdpUnit line;
    line.name = unit.name;
    for (const auto& flat : unit.flats) {
      line.numel += flat.layout.numel();
      line.sharded_bytes += static_cast<int64_t>(flat.own_segment.nbytes());
      line.gathered_bytes += flat.gathered_bytes();
      for (const auto i : flat.members) line.parameters.push_back(model.parameters[i].name);
    }
    result.push_back(std::move(line));
  }
  return result;
}

std::string FullyShardedDataParallelBase::table() const {
  std::string text = fmt::format("{:<32} {:>10} {:>14} {:>14} {:>14}\n", "unit", "parameters",
                                 "elements", "sharded bytes", "gathered bytes");
  for (const auto& unit : units()) {
    text += fmt::format("{:<32} {:>10} {:>14} {:>14} {:>14}\n",
                        unit.name.empty() ? "(root)" : unit.name, unit.parameters.size(),
                        unit.numel, unit.sharded_bytes, unit.gathered_bytes);
  }
  return text;
}

const FsdpStats& FullyShardedDataParallelBase::stats() const { return sharded_->stats; }

void FullyShardedDataParallelBase::reset_stats() {
  auto& stats = sharded_->stats;
  const auto gathered = stats.gathered_bytes, gradients = stats.gradient_bytes;
  stats = {};
  stats.gathered_bytes = stats.peak_gathered_bytes = gathered;
  stats.gradient_bytes = stats.peak_gradient_bytes = gradients;
  stats.peak_bytes = gathered + gradients;
}

FullyShardedDataParallelBase::Memory FullyShardedDataParallelBase::memory() const {
  Memory memory;
  for (const auto* flat : sharded_->model.flats) {
    memory.parameters += static_cast<int64_t>(flat->own_segment.nbytes());
    const auto& gradients = flat->gradients.own_segment;
    if (gradients.defined()) memory.gradients += static_cast<int64_t>(gradients.nbytes());
  }
  return memory;
}

const ProcessGroup& FullyShardedDataParallelBase::group() const { return sharded_->model.world; }
const FullyShardedDataParallelBase::Options& FullyShardedDataParallelBase::options() const {
  return sharded_->options;
}

std::vector<ParameterShard> FullyShardedDataParallelBase::shards(bool frozen_too) const {
  const auto& sharded = *sharded_;
  std::vector<const sharding::OwnedShard*> chosen;
  for (const auto* shard : sharded.model.shards())
    if (frozen_too || shard->tensor.requires_grad()) chosen.push_back(shard);
  return sharding::parameter_shards(chosen, sharded.model.parameters);
}

bool FullyShardedDataParallelBase::first_replica() const {
  return sharded_->model.replicas.rank() == 0;
}

}  // namespace tessera
