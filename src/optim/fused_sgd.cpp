#include <map>
#include <tuple>
#include <vector>

#include "optim/fused_base.h"
#include "optim/plain_math.h"

namespace tessera {

template <>
RangeUpdate FusedSGD::prepare(const at::Tensor& param, const at::Tensor& values,
                              const torch::optim::OptimizerOptions& options) {
  const auto& o = static_cast<const torch::optim::SGDOptions&>(options);
  RangeUpdate update;
  update.parameter = values.data_ptr();
  update.numel = values.numel();
  auto momentum = optim::Momentum::None;
  double keep = 1 - o.dampening();
  if (o.momentum() != 0) {
    momentum = o.nesterov() ? optim::Momentum::Nesterov : optim::Momentum::Plain;
    auto& buffer = optim::state_of<torch::optim::SGDParamState>(state_, param).momentum_buffer();
    if (!buffer.defined())
      keep = 1;  // the zero buffer becomes the first gradient, without dampening
    update.first = optim::match_state("momentum_buffer", buffer, values);
  }
  const double coefficients[] = {o.momentum(), keep, o.lr(), o.weight_decay()};
  std::copy(std::begin(coefficients), std::end(coefficients), update.coefficients);
  update.kernel = optim::sgd_kernel(optim::precision_of(values), o.weight_decay() != 0, momentum);
  return update;
}

template <>
void FusedSGD::plain_update(const Gradients& gradients,
                            const torch::optim::OptimizerOptions& options) {
  const auto& o = static_cast<const torch::optim::SGDOptions&>(options);
  using Kind = std::tuple<int, at::ScalarType, bool>;  // device, dtype, has a buffer
  std::map<Kind, std::vector<optim::SgdTensors>> on_device;
  at::Tensor none;
  for (const auto& [param, grad] : gradients) {
    auto& buffer =
        o.momentum() != 0
            ? optim::state_of<torch::optim::SGDParamState>(state_, param).momentum_buffer()
            : none;
    if (buffer.defined()) optim::match_state("momentum_buffer", buffer, param.detach());
    if (optim::is_listed(param, grad))
      on_device[{param.device().index(), param.scalar_type(), buffer.defined()}].push_back(
          {param, grad, &buffer});
    else optim::plain_sgd(param, grad, buffer, o);
  }
  for (const auto& [kind, tensors] : on_device)
    optim::list_sgd(tensors, o, optim::has_list_kernels(tensors.front().param));
}

template class Fused<torch::optim::SGDOptions, torch::optim::SGDParamState>;

}  // namespace tessera
