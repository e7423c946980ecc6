#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include "tessera/detail/range_update.h"
#include "tessera/optim/optimizer_state.h"

// SGD, Adam and AdamW in one pass over parameter, gradient and state, at the speed of the memory.
// Options and state are libtorch's own classes, so schedulers, state dicts and the plain optimizers
// interchange with these.
//
// [Note: bit identity] An element's result depends on its own values and its options alone: never
// on its position, on the chunk it is updated in, on the instruction set or on threads. The kernels
// use only operations that IEEE 754 rounds correctly (add, multiply, divide, square root) and are
// compiled without contraction to fused multiply-add. Sharded and unsharded training can therefore
// be compared bit by bit. Against libtorch's own optimizers results differ by rounding.

namespace tessera {

/// Base of the fused optimizers, with the interface that lets a reducer update ranges of a
/// parameter as their reduced gradients appear, instead of `step()` afterwards.
///
/// A step by ranges: `begin_update` once for the parameter, then `update_range` over ranges that
/// cover [0, numel) exactly once, in any order. Equal bit by bit to `step()` with the same
/// gradient. Not in the same step as `step()` for the same parameter, unless its gradient is
/// undefined then.
class FusedOptimizer : public torch::optim::Optimizer, public ElementWise {
 public:
  using torch::optim::Optimizer::Optimizer;

  /// Updates every parameter that has a gradient. CPU tensors of float32 and float64, of any
  /// strides, take the fused path, on up to at::get_num_threads() threads; others take plain tensor
  /// operations, or on CUDA libtorch's fused kernel where it has one. Throws UsageError on a sparse
  /// gradient, before anything is updated.
  torch::Tensor step(LossClosure closure = nullptr) override;

  /// Whether ranges of `param` can be updated: defined, dense, contiguous, float32, on the CPU.
  static bool supports_range(const at::Tensor& param);

  /// Creates the parameter's state where it is missing, counts the step, and fixes its
  /// coefficients. Throws UsageError when `param` is in no group of this optimizer or not
  /// `supports_range`. Not thread-safe. Looks through the groups for `param`.
  RangeUpdate begin_update(const at::Tensor& param);

  /// Updates elements [offset, offset + n) with the gradient grad[0..n) * grad_scale (the product
  /// is rounded to float32 first), and stores the new values to copy_out[0..n) too unless that is
  /// null. `grad` and `copy_out` overlap nothing that is written. Callable from any thread, several
  /// at a time on disjoint ranges. Does not check its arguments.
  static void update_range(const RangeUpdate& update, int64_t offset, const float* grad, int64_t n,
                           float grad_scale = 1.0F, float* copy_out = nullptr) {
    update.kernel(update, offset, grad, n, grad_scale, copy_out);
  }

 protected:
  using Gradients = std::vector<std::pair<at::Tensor, at::Tensor>>;  // parameter, gradient

  /// Begins the update of `param`'s values held in `values` (itself, or a dense copy), a float32 or
  /// float64 CPU tensor.
  virtual RangeUpdate prepare(const at::Tensor& param, const at::Tensor& values,
                              const torch::optim::OptimizerOptions& options) = 0;
  /// The whole update by tensor operations, for what `prepare` does not take.
  virtual void plain_update(const Gradients& gradients,
                            const torch::optim::OptimizerOptions& options) = 0;
};

/// torch::optim::SGD: momentum, dampening, weight decay (L2), Nesterov. The momentum buffer exists
/// only with momentum and begins as the first gradient.
class FusedSGD : public FusedOptimizer {
 public:
  /// Throws UsageError on an impossible option.
  FusedSGD(std::vector<torch::optim::OptimizerParamGroup> groups,
           torch::optim::SGDOptions defaults);
  FusedSGD(std::vector<at::Tensor> params, torch::optim::SGDOptions defaults);

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  RangeUpdate prepare(const at::Tensor& param, const at::Tensor& values,
                      const torch::optim::OptimizerOptions& options) override;
  void plain_update(const Gradients& gradients,
                    const torch::optim::OptimizerOptions& options) override;
};

/// torch::optim::Adam (Kingma and Ba 2015) with L2 weight decay and amsgrad.
class FusedAdam : public FusedOptimizer {
 public:
  /// Throws UsageError on an impossible option.
  explicit FusedAdam(std::vector<torch::optim::OptimizerParamGroup> groups,
                     torch::optim::AdamOptions defaults = {});
  explicit FusedAdam(std::vector<at::Tensor> params, torch::optim::AdamOptions defaults = {});

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  RangeUpdate prepare(const at::Tensor& param, const at::Tensor& values,
                      const torch::optim::OptimizerOptions& options) override;
  void plain_update(const Gradients& gradients,
                    const torch::optim::OptimizerOptions& options) override;
};

/// torch::optim::AdamW (Loshchilov and Hutter 2019): weight decay apart from the gradient, and
/// amsgrad.
class FusedAdamW : public FusedOptimizer {
 public:
  /// Throws UsageError on an impossible option.
  explicit FusedAdamW(std::vector<torch::optim::OptimizerParamGroup> groups,
                      torch::optim::AdamWOptions defaults = {});
  explicit FusedAdamW(std::vector<at::Tensor> params, torch::optim::AdamWOptions defaults = {});

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  RangeUpdate prepare(const at::Tensor& param, const at::Tensor& values,
                      const torch::optim::OptimizerOptions& options) override;
  void plain_update(const Gradients& gradients,
                    const torch::optim::OptimizerOptions& options) override;
};

/// Sum of squares of x[0..n), accumulated in float64; its order of additions is fixed, so the
/// result depends on the values and on `n` alone, not on the instruction set. For gradient norms.
double sum_of_squares(const float* x, int64_t n);

}  // namespace tessera
