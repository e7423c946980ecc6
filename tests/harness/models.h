#pragma once

#include <mutex>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace tessera::testing {

/// Parameters of sizes that no world size divides: 3 x 3, 1, 7 x 3, 7, 2 x 7, 2.
struct UnevenImpl : torch::nn::Module {
  UnevenImpl() {
    first = register_module("first", torch::nn::Linear(torch::nn::LinearOptions(3, 3).bias(false)));
    scale = register_parameter("scale", torch::ones({1}));
    second = register_module("second", torch::nn::Linear(3, 7));
    last = register_module("last", torch::nn::Linear(7, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    return last(torch::tanh(second(torch::tanh(first(x)) * scale)));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr};
  torch::Tensor scale;
};
TORCH_MODULE(Uneven);

/// A convolution stored channels-last, then a linear layer in float64: two dtypes, so two buckets,
/// and a parameter whose strides must be kept.
struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 5, 3).padding(1)));
    conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    head = register_module("head", torch::nn::Linear(5, 3));
    head->to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) {
    return head(torch::tanh(conv(x)).mean({2, 3}).to(torch::kDouble));
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Mixed);

/// A parameter and a buffer of two elements: weight * x + mean.
struct WithBuffer : torch::nn::Module {
  WithBuffer() {
    weight = register_parameter("weight", torch::ones({2}));
    mean = register_buffer("mean", torch::zeros({2}));
  }
  torch::Tensor forward(torch::Tensor x) { return weight * x + mean; }
  torch::Tensor weight, mean;
};

/// libtorch has one random generator for all threads.
inline std::mutex random_weights;

/// A Net with the same weights for the same seed, on every call and in every thread.
template <class Net, class... Args>
Net seeded(uint64_t seed, Args&&... args) {
  std::lock_guard lock(random_weights);
  torch::manual_seed(seed);
  return Net(std::forward<Args>(args)...);
}

/// Detached copies.
inline std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

}  // namespace tessera::testing
