#include "tessera/distributed_optimizer.h"

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include "distributed_optimizer/distributed_optimizer_impl.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::shared_ptr<torch::optim::Optimizer> build(
    const std::vector<DistributedOptimizer::Group>& groups, const OptimizerFactory& factory) {
  if (!factory) {
    throw UsageError(
        "DistributedOptimizer: the optimizer factory is empty; expected one such as "
        "default_optimizers().factory(…)");
  }
  if (groups.empty())
    throw UsageError("DistributedOptimizer: there are no parameter groups; expected at least one");
  const auto defaults =
      factory({torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{at::zeros({1})})})
          ->defaults()
          .clone();
  std::vector<torch::optim::OptimizerParamGroup> param_groups;
  NamedParameters all;
  for (const auto& group : groups) {
    const int rank = group.dist_group ? group.dist_group->rank() : 0;
    distributed_optimizer::check_group(group.parameters, all, param_groups.size(), rank);
    all.insert(all.end(), group.parameters.begin(), group.parameters.end());
    std::vector<at::Tensor> tensors;
    for (const auto& item : group.parameters) tensors.push_back(item.second);
    param_groups.emplace_back(tensors, defaults->clone());
    set_options(param_groups.back().options(), group.options);
  }
  return factory(std::move(param_groups));
}

NamedParameters names_of(const std::vector<DistributedOptimizer::Group>& groups) {
  NamedParameters names;
  for (const auto& group : groups)
    names.insert(names.end(), group.parameters.begin(), group.parameters.end());
  return names;
}

std::vector<std::optional<ProcessGroup>> dist_groups_of(
    const std::vector<DistributedOptimizer::Group>& groups) {
  std::vector<std::optional<ProcessGroup>> result;
  for (const auto& group : groups) result.push_back(group.dist_group);
  return result;
}

}  // namespace

DistributedOptimizer::DistributedOptimizer(const torch::nn::Module& module, ProcessGroup dist_group,
                                           const OptimizerFactory& factory, Options options)
    : DistributedOptimizer(
          module, std::vector<Group>{{named_parameters(module), {}, std::move(dist_group)}},
          factory, std::move(options)) {}

DistributedOptimizer::DistributedOptimizer(const torch::nn::Module& module,
                                           const OptimizerFactory& factory, Options options)
    : DistributedOptimizer(module, std::vector<Group>{{named_parameters(module)}}, factory,
                           std::move(options)) {}

DistributedOptimizer::DistributedOptimizer(const torch::nn::Module& module,
                                           std::vector<Group> groups,
                                           const OptimizerFactory& factory, Options options)
    : DistributedOptimizer(std::move(groups), factory, std::move(options)) {
  track_buffers(module);
}

DistributedOptimizer::DistributedOptimizer(std::vector<Group> groups,
                                           const OptimizerFactory& factory, Options options)
    : DistributedOptimizer(build(groups, factory), names_of(groups), dist_groups_of(groups),
                           std::move(options)) {}

DistributedOptimizer::DistributedOptimizer(std::shared_ptr<torch::optim::Optimizer> optimizer,
                                           const NamedParameters& names,
                                           std::vector<std::optional<ProcessGroup>> dist_groups,
                                           Options options)
    : impl_(std::make_unique<Impl>(std::move(optimizer), names, dist_groups, std::move(options))) {}

DistributedOptimizer::~DistributedOptimizer() = default;

void DistributedOptimizer::backward(const at::Tensor& loss) {
  impl_->follow_thaw(false);
  if (impl_->reduction_) impl_->reduction_->backward(loss);
  else loss.backward();
}

at::Tensor DistributedOptimizer::step(const torch::optim::Optimizer::LossClosure& closure) {
  impl_->follow_thaw(true);
  impl_->check_groups();
  if (impl_->reduction_) {
    impl_->reduction_->reducer().check_attached();
    impl_->reduction_->repack();
  }
  ++impl_->steps_;
  const auto period = impl_->options_.bcast_period;
  if (period > 0 && impl_->steps_ % period == 0) bcast_param();
  auto loss = impl_->optimizer_->step(closure);
  if (impl_->reduction_) impl_->reduction_->end_step(true);
  impl_->buffers_.synchronize(impl_->buffer_group(), impl_->has_data_);
  if (std::exchange(impl_->no_module_, false) && impl_->options_.buffers != BufferSync::none)
    sharding::report_no_module(Impl::kName, impl_->buffer_group());
  return loss;
}

void DistributedOptimizer::add_param_group(Group group) {
  impl_->add_param_group(std::move(group));
}

void DistributedOptimizer::track_buffers(const torch::nn::Module& module) {
  auto& group = impl_->buffer_group();
  impl_->no_module_ = false;
  impl_->buffers_ = sharding::ModuleBuffers(module, impl_->options_.buffers);
  group.check_contract(Impl::kName, impl_->buffers_.signatures());
  impl_->buffers_.broadcast(group, 0);
}

void DistributedOptimizer::end_step(StepEnd end) {
  sharding::check_scale_change(Impl::kName, impl_->synced_[0].group.rank(), end.scale);
  if (!impl_->reduction_) return;
  if (!end.used) impl_->reduction_->end_step(false);  // step() says that they were
  impl_->reduction_->rescale_wire(end.scale);
}

void DistributedOptimizer::zero_grad(bool set_to_none) {
  if (impl_->reduction_) impl_->reduction_->end_step(false);  // no effect after step()
  for (const auto& group : impl_->optimizer_->param_groups()) {
    for (auto parameter : group.params()) {
      auto& grad = parameter.mutable_grad();
      if (!grad.defined()) continue;
      if (set_to_none) grad = at::Tensor();
      else grad.detach_().zero_();
    }
  }
}

void DistributedOptimizer::bcast_param() { impl_->broadcast(0); }
torch::optim::Optimizer& DistributedOptimizer::optimizer() { return *impl_->optimizer_; }

OptimizerStateDict DistributedOptimizer::state_dict() const {
  return tessera::state_dict(*impl_->optimizer_, impl_->names_);
}

void DistributedOptimizer::load_state_dict(const OptimizerStateDict& dict, bool strict) {
  tessera::load_state_dict(*impl_->optimizer_, impl_->names_, dict, strict);
}

std::vector<std::vector<std::string>> DistributedOptimizer::packs(size_t group) const {
  if (!impl_->reduction_) return {};
  return impl_->reduction_->pack_names(group);
}

NoSync DistributedOptimizer::no_sync() {
  return NoSync([impl = impl_.get()](int change) {
    if (impl->reduction_) impl->reduction_->hold_sync(change);
  });
}

void DistributedOptimizer::shadow_backward() {
  if (impl_->reduction_) impl_->reduction_->shadow_backward();
}

ProcessGroup DistributedOptimizer::join_group() const {
  const auto& synced = impl_->synced_;
  if (synced.empty())
    throw UsageError(
        "DistributedOptimizer: no parameter group has a dist_group; join() expects at least one");
  for (const auto& other : synced) {
    if (other.group.world_ranks() == synced[0].group.world_ranks()) continue;
    throw UsageError(
        impl_->prefix() +
        ": its dist_groups have different ranks; join() expects the same ranks in all");
  }
  return synced[0].group;
}

void DistributedOptimizer::on_join_iteration(const JoinIteration& iteration) {
  impl_->set_join(iteration);
}

void DistributedOptimizer::shadow_step() {
  impl_->has_data_ = false;
  const auto reset = c10::make_scope_exit([this] { impl_->has_data_ = true; });
  shadow_backward();
  step();
}

void DistributedOptimizer::finish_join(int last_active_rank) {
  impl_->broadcast(last_active_rank);
  impl_->buffers_.broadcast(impl_->buffer_group(), last_active_rank);
}

}  // namespace tessera
