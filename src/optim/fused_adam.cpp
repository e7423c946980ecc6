#include <cmath>
#include <map>

#include "optim/fused_base.h"
#include "optim/plain_math.h"

namespace tessera {

namespace {

template <class State>
RangeUpdate prepare_adam(State& state, const at::Tensor& values, const optim::AdamNumbers& n) {
  RangeUpdate update;
  update.parameter = values.data_ptr();
  update.first = optim::match_state("exp_avg", state.exp_avg(), values);
  update.second = optim::match_state("exp_avg_sq", state.exp_avg_sq(), values);
  if (n.amsgrad)
    update.maximum = optim::match_state("max_exp_avg_sq", state.max_exp_avg_sq(), values);
  update.numel = values.numel();
  state.step(state.step() + 1);
  const auto step = static_cast<double>(state.step());
  const double coefficients[] = {n.beta1,
                                 1 - n.beta1,
                                 n.beta2,
                                 1 - n.beta2,
                                 1 / std::sqrt(1 - std::pow(n.beta2, step)),
                                 n.eps,
                                 n.lr / (1 - std::pow(n.beta1, step)),
                                 n.decoupled ? 1 - n.lr * n.weight_decay : 1.0,
                                 n.decoupled ? 0.0 : n.weight_decay};
  std::copy(std::begin(coefficients), std::end(coefficients), update.coefficients);
  update.kernel =
      optim::adam_kernel(optim::precision_of(values), update.coefficients[8] != 0, n.amsgrad);
  return update;
}

template <class State, class StateMap, class Gradients>
void plain_adam(StateMap& states, const Gradients& gradients, const optim::AdamNumbers& n) {
  // One call of libtorch's kernel takes tensors of the same device, dtype and step count.
  std::map<std::tuple<int, at::ScalarType, int64_t>, std::vector<optim::AdamTensors>> on_gpu;
  for (const auto& [param, grad] : gradients) {
    auto& state = optim::state_of<State>(states, param);
    const auto values = param.detach();
    optim::match_state("exp_avg", state.exp_avg(), values);
    optim::match_state("exp_avg_sq", state.exp_avg_sq(), values);
    if (n.amsgrad) optim::match_state("max_exp_avg_sq", state.max_exp_avg_sq(), values);
    state.step(state.step() + 1);
    const optim::AdamTensors tensors{
        param, grad, state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(), state.step()};
    if (param.is_cuda() && grad.strides() == param.strides() &&
        grad.scalar_type() == param.scalar_type())
      on_gpu[{param.device().index(), param.scalar_type(), state.step()}].push_back(tensors);
    else optim::plain_adam(tensors, n);
  }
  for (const auto& [key, tensors] : on_gpu) {
    if (!optim::libtorch_fused_adam(tensors, n))
      for (const auto& one : tensors) optim::plain_adam(one, n);
  }
}

}  // namespace

template <class Options, class State>
RangeUpdate Fused<Options, State>::prepare(const at::Tensor& param, const at::Tensor& values,
                                           const torch::optim::OptimizerOptions& options) {
  return prepare_adam(optim::state_of<State>(state_, param), values,
                      optim::adam_numbers(static_cast<const Options&>(options)));
}

template <class Options, class State>
void Fused<Options, State>::plain_update(const Gradients& gradients,
                                         const torch::optim::OptimizerOptions& options) {
  plain_adam<State>(state_, gradients, optim::adam_numbers(static_cast<const Options&>(options)));
}

template class Fused<torch::optim::AdamOptions, torch::optim::AdamParamState>;
template class Fused<torch::optim::AdamWOptions, torch::optim::AdamWParamState>;

}  // namespace tessera
