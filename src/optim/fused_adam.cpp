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
  using Kind = std::tuple<int, at::ScalarType, int64_t>;  // device, dtype, step
  std::map<Kind, std::vector<optim::AdamTensors>> on_device;
  for (const auto& [param, grad] : gradients) {
    auto& state = optim::state_of<State>(states, param);
    const auto values = param.detach();
    optim::match_state("exp_avg", state.exp_avg(), values);
    optim::match_state("exp_avg_sq", state.exp_avg_sq(), values);
    if (n.amsgrad) optim::match_state("max_exp_avg_sq", state.max_exp_avg_sq(), values);
    state.step(state.step() + 1);
    const optim::AdamTensors tensors{
        param, grad, state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(), state.step()};
    if (optim::is_listed(param, grad))
      on_device[{param.device().index(), param.scalar_type(), state.step()}].push_back(tensors);
    else optim::plain_adam(tensors, n);
  }
  for (const auto& [kind, tensors] : on_device)
    optim::list_adam(tensors, n, optim::has_list_kernels(tensors.front().param));
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
