#include "tessera/zero_redundancy_optimizer.h"

#include <fmt/format.h>

#include "tessera/error.h"
#include "zero/impl.h"

namespace tessera {

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(const torch::nn::Module& module,
                                                 ProcessGroup group, OptimizerFactory factory,
                                                 Options options)
    : ZeroRedundancyOptimizer(std::vector<Group>{{named_parameters(module), {}}}, std::move(group),
                              std::move(factory), options) {}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::vector<Group> groups, ProcessGroup group,
                                                 OptimizerFactory factory, Options options)
    : torch::optim::Optimizer(std::vector<torch::optim::OptimizerParamGroup>(),
                              Impl::default_options(factory)),
      impl_(std::make_unique<Impl>(*this, std::move(group), std::move(factory), options)) {
  if (groups.empty())
    throw UsageError(impl_->prefix() + ": there are no parameter groups; expected at least one");
  for (auto& entry : groups) impl_->add_group(std::move(entry));
  impl_->finish_construction();
}

ZeroRedundancyOptimizer::~ZeroRedundancyOptimizer() = default;

at::Tensor ZeroRedundancyOptimizer::step(LossClosure closure) { return impl_->step(closure); }
void ZeroRedundancyOptimizer::zero_grad(bool set_to_none) { impl_->zero_grad(set_to_none); }
double ZeroRedundancyOptimizer::clip_grad_norm_(double max_norm, double norm_type) {
  return impl_->clip(max_norm, norm_type);
}
double ZeroRedundancyOptimizer::grad_norm(double norm_type) { return impl_->grad_norm(norm_type); }
void ZeroRedundancyOptimizer::track_grad_norm(bool track) { impl_->track_norm_ = track; }
double ZeroRedundancyOptimizer::last_grad_norm() const { return impl_->last_norm_; }

void ZeroRedundancyOptimizer::add_param_group(Group group) {
  impl_->add_group(std::move(group));
  impl_->finish_construction();
}

void ZeroRedundancyOptimizer::consolidate_state_dict(int to) {
  if (to >= impl_->group_.size()) {
    throw UsageError(fmt::format(
        "{}.consolidate_state_dict: rank {}: to is {}; expected a rank below {}, or -1 for all",
        Impl::kName, impl_->group_.rank(), to, impl_->group_.size()));
  }
  auto dict = impl_->gather_state(to);
  if (to < 0 || to == impl_->group_.rank()) impl_->consolidated_ = std::move(dict);
  else impl_->consolidated_.reset();
}

const OptimizerStateDict& ZeroRedundancyOptimizer::state_dict() const {
  if (!impl_->consolidated_) {
    throw UsageError(impl_->prefix() +
                     ": there is no state dict on this rank; call consolidate_state_dict(to) on "
                     "all ranks first, with this rank or -1");
  }
  return *impl_->consolidated_;
}

void ZeroRedundancyOptimizer::load_state_dict(const OptimizerStateDict& dict) { impl_->load(dict); }
ZeroRedundancyOptimizer::Memory ZeroRedundancyOptimizer::memory() const { return impl_->memory(); }
const ZeroRedundancyOptimizer::Options& ZeroRedundancyOptimizer::options() const {
  return impl_->options_;
}

std::vector<std::pair<std::string, int64_t>> ZeroRedundancyOptimizer::owned() const {
  std::vector<std::pair<std::string, int64_t>> result;
  for (const auto& bucket : impl_->buckets_) {
    for (const auto& shard : bucket.shards)
      result.emplace_back(impl_->parameters_[shard.parameter].name, shard.numel);
  }
  return result;
}

void ZeroRedundancyOptimizer::shadow_backward() { impl_->shadow_backward(); }
ProcessGroup ZeroRedundancyOptimizer::join_group() const { return impl_->group_; }
void ZeroRedundancyOptimizer::on_join_iteration(const JoinIteration& iteration) {
  impl_->divisor_ = iteration.divisor;
}

void ZeroRedundancyOptimizer::shadow_step() {
  shadow_backward();
  step();
}

void ZeroRedundancyOptimizer::finish_join(int last_active_rank) {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : impl_->parameters_) tensors.push_back(parameter.tensor);
  impl_->group_.broadcast(tensors, last_active_rank);
}

NoSync ZeroRedundancyOptimizer::no_sync() {
  const auto set = [impl = impl_.get()](bool sync) {
    if (impl->reducer_) impl->reducer_->set_sync(sync);
  };
  return NoSync(impl_->reducer_ && impl_->reducer_->sync(), set);
}

}  // namespace tessera
