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

bool is_listed(const at::Tensor& param, const at::Tensor& grad) {
  return !param.is_cpu() && grad.strides() == param.strides() &&
         grad.scalar_type() == param.scalar_type() && param.is_non_overlapping_and_dense();
}

/// With operations that exist in every libtorch and work in place.
void copy_list(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  at::_foreach_zero_(to);
  at::_foreach_add_(to, from);
}

namespace {

using List = std::vector<at::Tensor>;

List like(const List& tensors) {
  List result;
  for (const auto& tensor : tensors) result.push_back(at::empty_like(tensor));
  return result;
}

/// The gradients, with decay of the parameters added in memory of their own.
List decayed(const List& grads, const List& params, double weight_decay) {
  const auto result = like(grads);
  copy_list(result, grads);
  at::_foreach_add_(result, params, weight_decay);
  return result;
}

void fused_adam(const compat::FusedAdamLists& lists, int64_t step, const AdamNumbers& n) {
  auto all = lists;
  // The kernel reads the step counts from the device as float32. They are all equal, so one tensor
  // is passed for all parameters.
  all.steps.assign(lists.params.size(), at::full({}, static_cast<double>(step),
                                                 lists.params[0].options().dtype(at::kFloat)));
  compat::fused_adam(all, n.decoupled, n.lr, n.beta1, n.beta2, n.weight_decay, n.eps, n.amsgrad);
}

void foreach_adam(const compat::FusedAdamLists& lists, int64_t steps, const AdamNumbers& n) {
  const auto& params = lists.params;
  auto grads = lists.grads;
  if (n.weight_decay != 0) {
    if (n.decoupled) at::_foreach_mul_(params, 1 - n.lr * n.weight_decay);
    else grads = decayed(grads, params, n.weight_decay);
  }
  at::_foreach_mul_(lists.exp_avgs, n.beta1);
  at::_foreach_add_(lists.exp_avgs, grads, 1 - n.beta1);
  at::_foreach_mul_(lists.exp_avg_sqs, n.beta2);
  at::_foreach_addcmul_(lists.exp_avg_sqs, grads, grads, 1 - n.beta2);
  const auto step = static_cast<double>(steps);
  const auto denominators = like(params);
  copy_list(denominators, lists.exp_avg_sqs);
  at::_foreach_sqrt_(denominators);
  at::_foreach_div_(denominators, std::sqrt(1 - std::pow(n.beta2, step)));
  at::_foreach_add_(denominators, n.eps);
  at::_foreach_addcdiv_(params, lists.exp_avgs, denominators,
                        -n.lr / (1 - std::pow(n.beta1, step)));
}

void foreach_sgd(const List& params, const List& grads, const List& buffers, bool first,
                 const torch::optim::SGDOptions& o) {
  auto directions = grads;
  if (o.weight_decay() != 0) directions = decayed(grads, params, o.weight_decay());
  if (o.momentum() != 0) {
    if (first) {
      copy_list(buffers, directions);
    } else {
      at::_foreach_mul_(buffers, o.momentum());
      at::_foreach_add_(buffers, directions, 1 - o.dampening());
    }
    if (!o.nesterov()) directions = buffers;
    else if (o.weight_decay() != 0) at::_foreach_add_(directions, buffers, o.momentum());
    else directions = decayed(grads, buffers, o.momentum());
  }
  at::_foreach_add_(params, directions, -o.lr());
}

}  // namespace

bool has_list_kernels(const at::Tensor& param) { return compat::kHasFusedAdam && param.is_cuda(); }

void list_adam(const std::vector<AdamTensors>& tensors, const AdamNumbers& n, bool fused) {
  if (n.amsgrad && !fused) {
    for (const auto& one : tensors) plain_adam(one, n);
    return;
  }
  compat::FusedAdamLists lists;
  for (const auto& t : tensors) {
    lists.params.push_back(t.param.detach());
    lists.grads.push_back(t.grad);
    lists.exp_avgs.push_back(t.exp_avg);
    lists.exp_avg_sqs.push_back(t.exp_avg_sq);
    if (n.amsgrad) lists.max_exp_avg_sqs.push_back(t.max_exp_avg_sq);
  }
  (fused ? fused_adam : foreach_adam)(lists, tensors.front().step, n);
}

void list_sgd(const std::vector<SgdTensors>& tensors, const torch::optim::SGDOptions& o,
              bool fused) {
  List params, grads, buffers;
  const bool first = o.momentum() != 0 && !tensors.front().buffer->defined();
  for (const auto& t : tensors) {
    params.push_back(t.param.detach());
    grads.push_back(t.grad);
    if (o.momentum() == 0) continue;
    if (first) *t.buffer = at::empty_like(params.back());
    buffers.push_back(*t.buffer);
  }
  if (fused) {
    compat::fused_sgd(params, grads, buffers, o.weight_decay(), o.momentum(), o.lr(), o.dampening(),
                      o.nesterov(), first);
  } else {
    foreach_sgd(params, grads, buffers, first, o);
  }
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
