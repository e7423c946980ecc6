#include "tessera/zero_redundancy_optimizer.h"

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/serialize.h>

#include "sharding/shard_state.h"
#include "tessera/detail/trainer_access.h"
#include "tessera/error.h"
#include "zero/impl.h"

namespace tessera {
namespace {

/// In place of the module of parameters that come without one.
const torch::nn::Module& no_module() {
  static const auto& module = *new torch::nn::Module();
  return module;
}

}  // namespace

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(const torch::nn::Module& module,
                                                 ProcessGroup group, OptimizerFactory factory,
                                                 Options options)
    : ZeroRedundancyOptimizer(module, std::vector<Group>{{named_parameters(module), {}}},
                              std::move(group), std::move(factory), options) {}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(const torch::nn::Module& module,
                                                 std::vector<Group> groups, ProcessGroup group,
                                                 OptimizerFactory factory, Options options)
    : torch::optim::Optimizer(std::vector<torch::optim::OptimizerParamGroup>(),
                              Impl::default_options(factory)),
      impl_(std::make_unique<Impl>(*this, group, std::move(factory), options, groups)) {
  if (groups.empty())
    throw UsageError(impl_->prefix() + ": there are no parameter groups; expected at least one");
  for (auto& entry : groups) impl_->add_group(std::move(entry));
  impl_->finish_construction(&module);
  if (&module != &no_module()) track_buffers(module);
}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::vector<Group> groups, ProcessGroup group,
                                                 OptimizerFactory factory, Options options)
    : ZeroRedundancyOptimizer(no_module(), std::move(groups), std::move(group), std::move(factory),
                              options) {}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(const torch::nn::Module& module,
                                                 OptimizerFactory factory, Options options)
    : ZeroRedundancyOptimizer(module, detail::default_group_of(Impl::kName), std::move(factory),
                              options) {}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(const torch::nn::Module& module,
                                                 std::vector<Group> groups,
                                                 OptimizerFactory factory, Options options)
    : ZeroRedundancyOptimizer(module, std::move(groups), detail::default_group_of(Impl::kName),
                              std::move(factory), options) {}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::vector<Group> groups,
                                                 OptimizerFactory factory, Options options)
    : ZeroRedundancyOptimizer(std::move(groups), detail::default_group_of(Impl::kName),
                              std::move(factory), options) {}

ZeroRedundancyOptimizer::~ZeroRedundancyOptimizer() = default;

at::Tensor ZeroRedundancyOptimizer::step(LossClosure closure) { return impl_->step(closure); }
void ZeroRedundancyOptimizer::zero_grad(bool set_to_none) { impl_->zero_grad(set_to_none); }
void ZeroRedundancyOptimizer::end_step(StepEnd end) {
  sharding::check_scale_change(Impl::kName, impl_->group.rank(), end.scale);
  if (!end.used) impl_->gradients.end_step(false);  // step() says that they were
  if (impl_->options.shard_gradients) impl_->gradients.rescale(end.scale);
}
GradNorm ZeroRedundancyOptimizer::clip_grad_norm_(double max_norm, double norm_type) {
  return impl_->clip(max_norm, norm_type);
}
void ZeroRedundancyOptimizer::clip_grad_value_(double clip_value) { impl_->clip_value(clip_value); }

void ZeroRedundancyOptimizer::track_buffers(const torch::nn::Module& module) {
  impl_->track_buffers(module);
}

void ZeroRedundancyOptimizer::add_param_group(Group group) {
  wait();
  impl_->follow_trainability();  // the existing buckets are watched anew
  impl_->add_group(std::move(group));
  impl_->finish_construction(nullptr);
}

void ZeroRedundancyOptimizer::consolidate_state_dict(int to) {
  const auto& group = impl_->group;
  if (to >= group.size()) {
    throw UsageError(fmt::format(
        "{}.consolidate_state_dict: rank {}: to is {}; expected a rank below {}, or -1 for all",
        Impl::kName, group.rank(), to, group.size()));
  }
  auto dict = impl_->gather_state(to);
  if (to < 0 || to == group.rank()) impl_->consolidated = std::move(dict);
  else impl_->consolidated.reset();
}

const OptimizerStateDict& ZeroRedundancyOptimizer::state_dict() const {
  if (!impl_->consolidated) {
    throw UsageError(impl_->prefix() +
                     ": there is no state dict on this rank; call consolidate_state_dict(to) on "
                     "all ranks first, with this rank or -1");
  }
  return *impl_->consolidated;
}

void ZeroRedundancyOptimizer::load_state_dict(const OptimizerStateDict& dict, bool strict) {
  if (strict) return impl_->load(dict);
  std::vector<std::vector<std::string>> names;
  for (const auto& group : groups()) names.push_back(group.parameters);
  impl_->load(sharding::for_groups(dict, names, *this));
}
void ZeroRedundancyOptimizer::save(torch::serialize::OutputArchive& archive) const {
  impl_->save(archive);
}
void ZeroRedundancyOptimizer::load(torch::serialize::InputArchive& archive) {
  impl_->load(archive);
}
ZeroRedundancyOptimizer::Memory ZeroRedundancyOptimizer::memory() const { return impl_->memory(); }
ZeroRedundancyOptimizer::Reductions ZeroRedundancyOptimizer::reductions() const {
  return impl_->mean->reductions;
}
const ZeroRedundancyOptimizer::Options& ZeroRedundancyOptimizer::options() const {
  return impl_->options;
}
std::vector<OptimizerStateDict::Group> ZeroRedundancyOptimizer::groups() const {
  return impl_->groups();
}

std::vector<ParameterShard> ZeroRedundancyOptimizer::shards() const {
  wait();
  // A program that scales the gradients of the shards would leave these out.
  for (const auto i : impl_->shards.thawed()) {
    const auto& [name, tensor] = impl_->shards.parameters()[i];
    if (!impl_->options.shard_gradients || !tensor.grad().defined()) continue;
    throw UsageError(fmt::format(
        "{}: shards(): the gradient of parameter {}, which became trainable, is not among theirs "
        "before its first step(); expected no call in that step, or clip_grad_norm_(), which "
        "includes it",
        impl_->prefix(), name));
  }
  return impl_->parameter_shards();
}

std::vector<StateSlice> ZeroRedundancyOptimizer::state_slices() const {
  wait();
  auto slices = tessera::state_slices(impl_->local.get(), impl_->parameter_shards());
  impl_->shards.add_residuals(slices);
  for (const auto& [name, tensor] : impl_->shards.parameters()) {
    const auto found = impl_->frozen_state.find(name);
    if (found != impl_->frozen_state.end() && impl_->group.rank() == 0)
      slices.push_back({whole_shard(name, tensor), found->second});
  }
  return slices;
}

void ZeroRedundancyOptimizer::load_state_slices(std::vector<StateSlice> slices) {
  impl_->load_slices(slices);
}

void ZeroRedundancyOptimizer::gather_parameters() {
  at::NoGradGuard no_grad;
  impl_->check_storage();
  impl_->shards.gather_exact();
}

void ZeroRedundancyOptimizer::with_shared_write(const std::function<void()>& write) {
  wait();
  impl_->write_shared(write);
}
void ZeroRedundancyOptimizer::wait_for_readers() {
  wait();
  if (impl_->shards.shared()) impl_->shards.shared()->wait_for_readers();
}

void ZeroRedundancyOptimizer::wait() const { impl_->shards.wait_for_gathers(); }

void zero::TrainerAccess::use_up_gradients(ZeroRedundancyOptimizer& optimizer) {
  if (auto* own = optimizer.impl_->own_gradients) own->use_up_gradients();
}
void zero::TrainerAccess::track_norm(ZeroRedundancyOptimizer& optimizer, bool track) {
  optimizer.impl_->norm.tracking = track;
}
double zero::TrainerAccess::last_norm(const ZeroRedundancyOptimizer& optimizer) {
  return optimizer.impl_->norm.last;
}

void ZeroRedundancyOptimizer::shadow_backward() { impl_->shadow_backward(); }
ProcessGroup ZeroRedundancyOptimizer::join_group() const { return impl_->group; }
void ZeroRedundancyOptimizer::on_join_iteration(const JoinIteration& iteration) {
  impl_->mean->divisor = iteration.divisor;
  impl_->buffers.set_active(iteration.first_active, iteration.active_ranks);
}

void ZeroRedundancyOptimizer::shadow_step() {
  impl_->has_data = false;
  const auto reset = c10::make_scope_exit([this] { impl_->has_data = true; });
  shadow_backward();
  step();
}

void ZeroRedundancyOptimizer::finish_join(int last_active_rank) {
  wait();
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : impl_->shards.parameters()) tensors.push_back(parameter.tensor);
  // Shared ones are equal: every rank has taken part in every step.
  if (!impl_->shards.shares()) impl_->group.broadcast(tensors, last_active_rank);
  impl_->buffers.broadcast(impl_->group, last_active_rank);
}

NoSync ZeroRedundancyOptimizer::no_sync() {
  return NoSync([impl = impl_.get()](int change) { impl->mean->hold_sync(change); });
}

}  // namespace tessera
