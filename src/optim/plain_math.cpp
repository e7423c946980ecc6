#include "optim/plain_math.h"

#include <cmath>

#include "tessera/detail/torch_compat.h"

namespace tessera::optim {

void plain_adam(const AdamTensors& t, const AdamNumbers& n) {
  auto param = t.param.detach();
  auto grad = t.grad;
  if (n.weight_decay != 0) {
    if (n.decoupled) param.mul_(1 - n.lr * n.weight_decay);
    else grad = grad.add(param, n.weight_decay);
  }
  auto first = t.exp_avg, second = t.exp_avg_sq;
  first.mul_(n.beta1).add_(grad, 1 - n.beta1);
  second.mul_(n.beta2).addcmul_(grad, grad, 1 - n.beta2);
  if (n.amsgrad) {
    auto maximum = t.max_exp_avg_sq;
    at::maximum_out(maximum, maximum, second);
    second = maximum;
  }
  const double step = static_cast<double>(t.step);
  const auto denominator = (second.sqrt() / std::sqrt(1 - std::pow(n.beta2, step))).add_(n.eps);
  param.addcdiv_(first, denominator, -n.lr / (1 - std::pow(n.beta1, step)));
}

bool libtorch_fused_adam(const std::vector<AdamTensors>& tensors, const AdamNumbers& n) {
  if (!compat::kHasFusedAdam || tensors.empty()) return false;
  compat::FusedAdamLists lists;
  // The kernel reads the step counts from the device as float32. They are all equal, so one tensor
  // is passed for all parameters.
  const auto step =
      at::full({}, static_cast<double>(tensors.front().step),
               tensors.front().param.options().dtype(at::kFloat).requires_grad(false));
  for (const auto& t : tensors) {
    lists.params.push_back(t.param.detach());
    lists.grads.push_back(t.grad);
    lists.exp_avgs.push_back(t.exp_avg);
    lists.exp_avg_sqs.push_back(t.exp_avg_sq);
    if (n.amsgrad) lists.max_exp_avg_sqs.push_back(t.max_exp_avg_sq);
    lists.steps.push_back(step);
  }
  compat::fused_adam(lists, n.decoupled, n.lr, n.beta1, n.beta2, n.weight_decay, n.eps, n.amsgrad);
  return true;
}

void plain_sgd(const at::Tensor& param, const at::Tensor& grad, at::Tensor& buffer,
               const torch::optim::SGDOptions& o) {
  auto values = param.detach();
  auto direction = grad;
  if (o.weight_decay() != 0) direction = direction.add(values, o.weight_decay());
  if (o.momentum() != 0) {
    if (buffer.defined()) buffer.mul_(o.momentum()).add_(direction, 1 - o.dampening());
    else buffer = direction.clone().detach();
    direction = o.nesterov() ? direction.add(buffer, o.momentum()) : buffer;
  }
  values.add_(direction, -o.lr());
}

}  // namespace tessera::optim
