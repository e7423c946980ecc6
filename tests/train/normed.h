// A model with buffers that training changes, and data whose statistics drift.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "tessera/train/registries.h"

namespace tessera::testing {

/// Samples for training whose distribution drifts, so that ranks see different statistics.
template <int64_t Samples>
struct Drifting : Dataset {
  int64_t size() const override { return Samples; }
  std::string describe() const override { return "drifting"; }
  Batch get(const std::vector<int64_t>& samples) const override {
    const at::Tensor i = torch::tensor(samples, torch::kLong) % size();
    const at::Tensor x = torch::stack({i.sin() + i * 0.1, i.cos() * (i + 1), i * 0.01}, 1);
    return {x, i.sin().gt(0).to(torch::kLong)};
  }
  std::shared_ptr<const Dataset> validation() const { return std::make_shared<Drifting>(); }
};

struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : one(register_module("one", torch::nn::Linear(3, 5))),
        norm(register_module("norm", torch::nn::BatchNorm1d(5))),
        two(register_module("two", torch::nn::Linear(5, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return two(norm(one(x)).tanh()); }
  torch::nn::Linear one;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear two;
};
TORCH_MODULE(Normed);

}  // namespace tessera::testing
