#pragma once

#include <mutex>
#include <vector>

#include <torch/torch.h>

namespace tessera::testing {

/// Sizes that divide by nothing: 3x3, 1, 7, 5x3 …
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

/// A convolution in channels-last memory, then a head in double: two buckets, and strides to keep.
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

/// The same weights on every call.
template <class Net, class... Args>
Net seeded(uint64_t seed, Args&&... args) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  torch::manual_seed(seed);
  return Net(std::forward<Args>(args)...);
}

inline std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

}  // namespace tessera::testing
