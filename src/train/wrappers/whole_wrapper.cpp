#include "train/wrappers/whole_wrapper.h"

#include <cmath>

#include "tessera/error.h"
#include "tessera/optim/fused_optimizer.h"
#include "tessera/train/registries.h"
#include "train/builtins/builtin.h"

namespace tessera::train {

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

int64_t bytes_of(const std::vector<StateSlice>& slices) {
  int64_t bytes = 0;
  for (const auto& slice : slices) {
    for (const auto& [name, tensor] : slice.state.tensors) {
      bytes += static_cast<int64_t>(tensor.nbytes());
    }
  }
  return bytes;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const OptimizerPlan& plan,
    const std::vector<std::pair<std::vector<at::Tensor>, OptionMap>>& groups) {
  std::vector<torch::optim::OptimizerParamGroup> made;
  for (const auto& [tensors, options] : groups) {
    made.emplace_back(tensors, registry::optimizers().options_for(plan.type, options));
  }
  return plan.factory()(std::move(made));
}

at::Tensor whole_of(const torch::nn::Module& module, const std::string& name,
                    const ProcessGroup& group) {
  return group.rank() == 0 ? module.named_parameters(true)[name].detach() : at::Tensor();
}

const std::vector<std::pair<std::string, Partition>>& partitions() {
  static const std::vector<std::pair<std::string, Partition>> known{
      {"flat", Partition::flat}, {"whole", Partition::whole}, {"first_fit", Partition::first_fit}};
  return known;
}

void clamp_gradients(const std::vector<at::Tensor>& gradients, double largest) {
  const torch::NoGradGuard no_grad;
  for (const auto& gradient : gradients) {
    at::Tensor(gradient).clamp_(-largest, largest);
  }
}

WholeWrapper::WholeWrapper(WrapperContext context)
    : ModelWrapper(std::move(context.model), std::move(context.preprocessor),
                   std::move(context.group)) {
  std::vector<std::pair<std::vector<at::Tensor>, OptionMap>> groups;
  for (const auto& group : context.optimizer.groups(*model_.module)) {
    auto& [tensors, options] = groups.emplace_back(std::vector<at::Tensor>(), group.options);
    for (const auto& named : group.parameters) {
      tensors.push_back(named.second);
      named_.push_back(named);
    }
  }
  optimizer_ = make_optimizer(context.optimizer, groups);
}

std::vector<at::Tensor> WholeWrapper::gradients() {
  std::vector<at::Tensor> result;
  for (const auto& [name, parameter] : named_) {
    if (parameter.grad().defined()) {
      result.push_back(parameter.grad());
    }
  }
  return result;
}

double WholeWrapper::update(const GradientRules& rules) {
  const torch::NoGradGuard no_grad;
  const auto all = gradients();
  double squares = 0;
  for (const auto& grad : all) {
    if (grad.is_cpu() && grad.scalar_type() == at::kFloat && grad.is_contiguous()) {
      squares += sum_of_squares(grad.data_ptr<float>(), grad.numel());
    } else {
      squares += grad.to(at::kDouble).square().sum().item<double>();
    }
  }
  const double norm = std::sqrt(squares);
  // The rule of torch.nn.utils.clip_grad_norm_.
  if (const double factor = rules.clip_norm ? *rules.clip_norm / (norm + 1e-6) : 1; factor < 1) {
    for (const auto& grad : all) {
      at::Tensor(grad).mul_(factor);
    }
  }
  if (rules.clip_value) {
    clamp_gradients(all, *rules.clip_value);
  }
  step();
  drop_gradients();
  return norm;
}

void WholeWrapper::drop_gradients() {
  for (auto& [name, parameter] : named_) {
    parameter.mutable_grad() = at::Tensor();
  }
}

int64_t WholeWrapper::gradient_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, parameter] : named_) {
    bytes += static_cast<int64_t>(parameter.nbytes());
  }
  return bytes;
}

MemoryUse WholeWrapper::memory() {
  return {bytes_of(model_.module->parameters()), gradient_bytes(), bytes_of(state_slices())};
}

WrapperPlan read_unsharded(OptionReader& options) {
  options.finish();
  WrapperPlan plan;
  plan.distributed = false;
  plan.make = [](WrapperContext context) {
    return std::make_unique<WholeWrapper>(std::move(context));
  };
  return plan;
}

}  // namespace tessera::train
