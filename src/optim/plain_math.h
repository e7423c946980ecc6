#pragma once

#include <utility>
#include <vector>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

// The updates as tensor operations, for tensors that the fused kernels do not take: other dtypes,
// other devices. The arithmetic is libtorch's own optimizers'. Call without autograd.

namespace tessera::optim {

/// One parameter's part in a step of Adam; `step` counts this one.
struct AdamTensors {
  at::Tensor param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq;
  int64_t step = 0;
};

struct AdamNumbers {
  double lr, beta1, beta2, eps, weight_decay;
  bool amsgrad;
  bool decoupled;
};

template <class Options>
AdamNumbers adam_numbers(const Options& o) {
  return {o.lr(),
          std::get<0>(o.betas()),
          std::get<1>(o.betas()),
          o.eps(),
          o.weight_decay(),
          o.amsgrad(),
          std::is_same_v<Options, torch::optim::AdamWOptions>};
}

void plain_adam(const AdamTensors& tensors, const AdamNumbers& numbers);

/// libtorch's fused kernel over lists of tensors of one device and dtype, all at the same step.
/// False, with nothing done, where this libtorch has none.
bool libtorch_fused_adam(const std::vector<AdamTensors>& tensors, const AdamNumbers& numbers);

/// `buffer`: the momentum buffer; undefined at the first step with momentum, and then defined
/// afterwards.
void plain_sgd(const at::Tensor& param, const at::Tensor& grad, at::Tensor& buffer,
               const torch::optim::SGDOptions& options);

}  // namespace tessera::optim
