#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "tessera/detail/range_update.h"
#include "tessera/optim/optimizer_state.h"

// SGD, Adam and AdamW in one pass over parameter, gradient and state, limited by memory bandwidth.
// Options and state are libtorch's own classes, so these optimizers, libtorch's optimizers,
// schedulers and state dicts are interchangeable.
//
// [Note: bit identity] The result for an element depends only on its own values and on the options,
// not on its position, its chunk, the instruction set or the number of threads. The kernels
// use only operations that IEEE 754 rounds correctly (add, multiply, divide, square root) and are
// compiled without contraction to fused multiply-add. Sharded and unsharded training can therefore
// be compared bit by bit. Against libtorch's own optimizers results differ by rounding.

#pragma GCC visibility push(default)
namespace tessera {

/// Base class of the fused optimizers. Besides `step()` it can update ranges of a parameter, so
/// that a reducer can update each range as soon as its gradient is reduced.
///
/// A step by ranges: call `begin_update` once for the parameter, then `update_range` for ranges
/// that cover [0, numel) exactly once, in any order. The result is bit-identical to `step()` with
/// the same gradient. Do not call `step()` in the same step unless the parameter's gradient is
/// undefined.
class FusedOptimizer : public torch::optim::Optimizer, public ElementWise {
 public:
  using torch::optim::Optimizer::Optimizer;

  /// Updates every parameter that has a gradient. CPU tensors of float32 and float64 with any
  /// strides use the fused kernels on up to at::get_num_threads() threads. On CUDA libtorch's fused
  /// kernel is used where it exists. All others use plain tensor operations. Throws UsageError for
  /// a sparse gradient, before any update.
  torch::Tensor step(LossClosure closure = nullptr) override;

  /// True if ranges of `param` can be updated: it is defined, dense, contiguous, float32 and on the
  /// CPU.
  static bool supports_range(const at::Tensor& param);

  /// Creates the parameter's state if it is missing, increments its step count and computes the
  /// coefficients of this step. Throws UsageError when `param` is in no group of this optimizer or
  /// `supports_range` is false. Searches all groups for `param`. Not thread-safe.
  RangeUpdate begin_update(const at::Tensor& param);

  /// Updates elements [offset, offset + n) with the gradient grad[0..n) * grad_scale (the product
  /// is rounded to float32 first). Also stores the new values in copy_out[0..n) unless that is
  /// null. `grad` and `copy_out` must not overlap memory that is written. May be called from any
  /// thread, also from several at a time for disjoint ranges. Does not check its arguments.
  static void update_range(const RangeUpdate& update, int64_t offset, const float* grad, int64_t n,
                           float grad_scale = 1.0F, float* copy_out = nullptr) {
    update.kernel(update, offset, grad, n, grad_scale, copy_out);
  }

 protected:
  using Gradients = std::vector<std::pair<at::Tensor, at::Tensor>>;  // parameter, gradient

  /// Begins the update of `param`, whose values are in `values`: `param` itself or a dense copy, a
  /// float32 or float64 CPU tensor.
  virtual RangeUpdate prepare(const at::Tensor& param, const at::Tensor& values,
                              const torch::optim::OptimizerOptions& options) = 0;
  /// The whole update by tensor operations, for tensors that `prepare` does not accept.
  virtual void plain_update(const Gradients& gradients,
                            const torch::optim::OptimizerOptions& options) = 0;
};

/// A fused optimizer over libtorch's own options and state of one class.
template <class Options, class State>
class Fused : public FusedOptimizer {
 public:
  /// Throws UsageError on an impossible option. FusedSGD has no default options.
  explicit Fused(std::vector<torch::optim::OptimizerParamGroup> groups,
                 Options defaults = Options());
  explicit Fused(std::vector<at::Tensor> params, Options defaults = Options());

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  RangeUpdate prepare(const at::Tensor& param, const at::Tensor& values,
                      const torch::optim::OptimizerOptions& options) override;
  void plain_update(const Gradients& gradients,
                    const torch::optim::OptimizerOptions& options) override;
};

/// torch::optim::SGD with momentum, dampening, weight decay (L2) and Nesterov momentum. The
/// momentum buffer exists only if momentum is not 0; its initial value is the first gradient.
using FusedSGD = Fused<torch::optim::SGDOptions, torch::optim::SGDParamState>;
/// torch::optim::Adam (Kingma and Ba 2015) with L2 weight decay and amsgrad.
using FusedAdam = Fused<torch::optim::AdamOptions, torch::optim::AdamParamState>;
/// torch::optim::AdamW (Loshchilov and Hutter 2019) with decoupled weight decay and amsgrad.
using FusedAdamW = Fused<torch::optim::AdamWOptions, torch::optim::AdamWParamState>;

/// The sum of squares of x[0..n), accumulated in float64. The order of additions is fixed, so the
/// result depends only on the values and `n`, not on the instruction set. For gradient norms.
double sum_of_squares(const float* x, int64_t n);

}  // namespace tessera
#pragma GCC visibility pop
