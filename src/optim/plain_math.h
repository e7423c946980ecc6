#pragma once

#include <utility>
#include <vector>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

// The updates as tensor operations, for dtypes and devices that the fused kernels do not support.
// The arithmetic is that of libtorch's optimizers. Call with autograd disabled.

namespace tessera::optim {

/// The tensors of one parameter in a step of Adam. `step` includes the current step.
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

/// True if the parameter can be in a list of an accelerator's tensors, which are updated together.
bool is_listed(const at::Tensor& param, const at::Tensor& grad);
/// Copies tensors of one device and dtype in two launches.
void copy_list(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from);
/// True if libtorch has kernels for lists of this parameter's device.
bool has_list_kernels(const at::Tensor& param);
/// Tensors of one device and dtype, all at the same step: one launch of libtorch's kernel if
/// `fused`, which must exist, else one launch for each operation.
void list_adam(const std::vector<AdamTensors>& tensors, const AdamNumbers& numbers, bool fused);

/// `buffer`: the momentum buffer. If it is undefined at a step with momentum, it is created.
void plain_sgd(const at::Tensor& param, const at::Tensor& grad, at::Tensor& buffer,
               const torch::optim::SGDOptions& options);

/// The tensors of one parameter in a step of SGD. `buffer`: as in plain_sgd().
struct SgdTensors {
  at::Tensor param, grad;
  at::Tensor* buffer;
};
/// As list_adam(). Either all buffers are defined or none is.
void list_sgd(const std::vector<SgdTensors>& tensors, const torch::optim::SGDOptions& options,
              bool fused);

}  // namespace tessera::optim
