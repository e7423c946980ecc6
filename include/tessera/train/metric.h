#pragma once

#include <functional>
#include <string>
#include <vector>

#include <torch/types.h>

#include "tessera/data/dataset.h"

#pragma GCC visibility push(default)
namespace tessera {

/// One or several figures over all samples of an evaluation, whatever their batches and ranks. A
/// metric has no state: its counts are in the tensors that its functions return. All functions are
/// local.
struct Metric {
  /// Names of the figures that `result` returns, as in the log without "eval_".
  std::vector<std::string> figures;
  /// The contribution of one batch: a tensor of numbers of any shape, the same for each batch, on
  /// any device. `prediction`: the result of ModelWrapper::val_step(). `batch`: after the
  /// preprocessor. Called without autograd.
  std::function<at::Tensor(const at::Tensor& prediction, const Batch& batch)> accumulate;
  /// The figures, from the sum of all batches' contributions: float64, on the CPU.
  std::function<std::vector<double>(const at::Tensor& total)> result;
  /// Joins the contributions of two sets of samples; both are float64, on the CPU. Empty: a + b.
  std::function<at::Tensor(const at::Tensor& a, const at::Tensor& b)> merge = {};
};

}  // namespace tessera
#pragma GCC visibility pop
