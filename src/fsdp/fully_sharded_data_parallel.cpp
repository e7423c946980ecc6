#include "tessera/fully_sharded_data_parallel.h"

#include <fmt/format.h>

#include "fsdp/sharded_module.h"
#include "sharding/gradients/gradient_norm.h"
#include "sharding/shard_state.h"
#include "tessera/error.h"

namespace tessera {

namespace detail {

FullySharded::FullySharded(torch::nn::Module& module, ProcessGroup group,
                           FullyShardedDataParallelOptions options)
    : core_(std::make_shared<fsdp::ShardedModule>(module, std::move(group), std::move(options))) {}

FullySharded::~FullySharded() = default;

void FullySharded::begin_forward() { core_->begin_forward(); }
void FullySharded::end_forward(bool threw) { core_->end_forward(threw); }

}  // namespace detail

namespace {

NamedParameters shards_of(const fsdp::ShardedModule& core) {
  NamedParameters result;
  for (size_t i = 0; i < core.model.parameters.size(); ++i)
    result.emplace_back(core.model.parameters[i].name, core.model.shard_of(i).tensor);
  return result;
}

}  // namespace

std::vector<at::Tensor> FullyShardedDataParallelBase::parameters() const {
  std::vector<at::Tensor> result;
  for (auto& [name, shard] : shards_of(core_->core())) result.push_back(shard);
  return result;
}

NamedParameters FullyShardedDataParallelBase::named_parameters() const {
  return shards_of(core_->core());
}

void FullyShardedDataParallelBase::check_optimizer(const torch::optim::Optimizer& optimizer) const {
  const auto& core = core_->core();
  if (is_element_wise(optimizer) || core.model.shard_group.size() == 1) return;
  const std::string known =
      "SGD, Adam, AdamW, Adagrad, RMSprop, a class declared with "
      "declare_element_wise<YourOptimizer>(), ";
  if (core.options.partition == Partition::flat) {
    throw UsageError(core.prefix() +
                     ": the optimizer is not known to be element-wise, but parameters are cut into "
                     "shards, on which any other is silently wrong; expected " +
                     known +
                     "or, for one that takes parameters one by one, option partition whole");
  }
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer)) {
    throw UsageError(
        core.prefix() +
        ": LBFGS looks at all parameters at once, but each rank has some of them; expected " +
        known + "or sharding_strategy no_shard");
  }
}

at::Tensor FullyShardedDataParallelBase::cast_input(const at::Tensor& input) const {
  if (!casts_inputs() || !input.defined() || !input.is_floating_point()) return input;
  const auto dtype = *core_->core().options.mixed_precision.param_dtype;
  return input.scalar_type() == dtype ? input : input.to(dtype);
}

bool FullyShardedDataParallelBase::casts_inputs() const {
  const auto& core = core_->core();
  const auto& mixed = core.options.mixed_precision;
  return mixed.param_dtype && mixed.cast_forward_inputs && !core.full_precision();
}

double FullyShardedDataParallelBase::clip_grad_norm_(double max_norm, double norm_type) {
  return core_->core().clip(max_norm, norm_type);
}
double FullyShardedDataParallelBase::grad_norm(double norm_type) {
  return core_->core().grad_norm(norm_type);
}

FullParams FullyShardedDataParallelBase::summon_full_params(const std::string& prefix,
                                                            bool writeback, bool rank0_only) {
  return FullParams(core_->core().shared_from_this(), prefix, writeback, rank0_only);
}

NoSync FullyShardedDataParallelBase::no_sync() {
  auto* gradients = core_->core().gradients.get();
  return NoSync(gradients->sync(), [gradients](bool sync) { gradients->set_sync(sync); });
}

void FullyShardedDataParallelBase::zero_grad(bool set_to_none) {
  core_->core().require_idle("zero_grad");
  core_->core().gradients->zero_grad(set_to_none);
}

void FullyShardedDataParallelBase::shadow_backward() { core_->core().shadow_backward(); }
void FullyShardedDataParallelBase::set_shadow_step(std::function<void()> step) {
  core_->core().step_of_shadow = std::move(step);
}
ProcessGroup FullyShardedDataParallelBase::join_group() const { return group(); }
void FullyShardedDataParallelBase::on_join_iteration(const JoinIteration& iteration) {
  core_->core().join_leader.begin_iteration(iteration);
}
void FullyShardedDataParallelBase::shadow_step() { core_->core().shadow_step(); }
void FullyShardedDataParallelBase::finish_join(int last_active_rank) {
  core_->core().finish_join(last_active_rank);
}

std::vector<FsdpUnit> FullyShardedDataParallelBase::units() const { return core_->core().units(); }

std::string FullyShardedDataParallelBase::table() const {
  std::string text = fmt::format("{:<32} {:>10} {:>14} {:>14} {:>14} {:>8}\n", "unit", "parameters",
                                 "elements", "sharded bytes", "gathered bytes", "padding");
  for (const auto& unit : units()) {
    text += fmt::format("{:<32} {:>10} {:>14} {:>14} {:>14} {:>8}\n",
                        unit.name.empty() ? "(root)" : unit.name, unit.parameters.size(),
                        unit.numel, unit.sharded_bytes, unit.gathered_bytes, unit.padding_bytes);
  }
  return text;
}

const FsdpStats& FullyShardedDataParallelBase::stats() const { return core_->core().stats; }

void FullyShardedDataParallelBase::reset_stats() {
  auto& stats = core_->core().stats;
  const auto gathered = stats.gathered_bytes, gradients = stats.gradient_bytes;
  stats = {};
  stats.gathered_bytes = stats.peak_gathered_bytes = gathered;
  stats.gradient_bytes = stats.peak_gradient_bytes = gradients;
  stats.peak_bytes = gathered + gradients;
}

FullyShardedDataParallelBase::Memory FullyShardedDataParallelBase::memory() const {
  Memory memory;
  for (const auto& flat : core_->core().model.flats)
    memory.parameters += static_cast<int64_t>(flat.own_segment.nbytes());
  memory.gradients = core_->core().gradients->shard_bytes();
  return memory;
}

const ProcessGroup& FullyShardedDataParallelBase::group() const {
  return core_->core().model.world;
}
const FullyShardedDataParallelBase::Options& FullyShardedDataParallelBase::options() const {
  return core_->core().options;
}

std::vector<ParameterShard> FullyShardedDataParallelBase::shards() const {
  const auto& core = core_->core();
  std::vector<const sharding::OwnedShard*> trainable;
  for (const auto* shard : core.shards()) {
    if (shard->tensor.requires_grad()) trainable.push_back(shard);
  }
  return sharding::parameter_shards(trainable, core.model.parameters);
}

bool FullyShardedDataParallelBase::first_replica() const {
  return core_->core().model.replicas.rank() == 0;
}

void FullyShardedDataParallelBase::clip_grad_value_(double clip_value) {
  auto& core = core_->core();
  sharding::check_clip_value(core.prefix(), clip_value);
  core.require_idle("clip_grad_value_");
  at::NoGradGuard no_grad;
  for (const auto* shard : core.shards()) {
    if (shard->tensor.grad().defined())
      shard->tensor.mutable_grad().clamp_(-clip_value, clip_value);
  }
}

}  // namespace tessera
