#include "train/whole_model.h"

#include <cmath>

#include "tessera/fused_optimizer.h"
#include "tessera/optim.h"
#include "tessera/optimizer_state.h"

namespace tessera::train {
namespace {

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

}  // namespace

WholeModel::WholeModel(const OptimizerConfig& config, const torch::nn::Module& module) {
  const std::vector<at::Tensor> all = module.parameters();
  parameter_bytes_ = bytes_of(all);
  for (const auto& parameter : all) {
    if (parameter.requires_grad()) {
      parameters_.push_back(parameter);
    }
  }
  const OptimizerFactory factory = default_optimizers().factory(config.type, config.options);
  optimizer_ = factory({torch::optim::OptimizerParamGroup(parameters_)});
}

double WholeModel::grad_norm() const {
  double squares = 0;
  for (const auto& parameter : parameters_) {
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined()) {
      continue;
    }
    if (grad.is_cpu() && grad.scalar_type() == at::kFloat && grad.is_contiguous()) {
      squares += sum_of_squares(grad.data_ptr<float>(), grad.numel());
    } else {
      squares += grad.detach().to(at::kDouble).square().sum().item<double>();
    }
  }
  return std::sqrt(squares);
}

double WholeModel::step(std::optional<double> max_norm, const std::function<void()>& update) {
  torch::NoGradGuard no_grad;
  const double norm = grad_norm();
  // The rule of torch.nn.utils.clip_grad_norm_.
  if (const double factor = max_norm ? *max_norm / (norm + 1e-6) : 1; factor < 1) {
    for (const auto& parameter : parameters_) {
      if (parameter.grad().defined()) {
        parameter.grad().mul_(factor);
      }
    }
  }
  if (update) update();
  else optimizer_->step();
  for (auto& parameter : parameters_) {
    parameter.mutable_grad() = at::Tensor();
  }
  return norm;
}

double WholeModel::lr() const { return group_lr(*optimizer_); }

void WholeModel::set_lr(double lr) { set_group_lr(*optimizer_, lr); }

MemoryUse WholeModel::memory() const {
  MemoryUse use{parameter_bytes_, bytes_of(parameters_), 0};
  for (const auto& parameter : parameters_) {
    if (const auto state = get_state(*optimizer_, parameter)) {
      for (const auto& [name, tensor] : state->tensors) {
        use.optimizer_state += static_cast<int64_t>(tensor.nbytes());
      }
    }
  }
  return use;
}

double group_lr(torch::optim::Optimizer& optimizer) { return optimizer.param_groups().front().options().get_lr(); }

void set_group_lr(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) {
    group.options().set_lr(lr);
  }
}

}  // namespace tessera::train
