#pragma once

#include <functional>
#include <string>

#include <torch/nn/modules/container/any.h>

#include "tessera/models/image_classifier.h"

namespace tessera {

/// Registers the norm layer after a convolution of `channels` channels as `name` in `parent`.
using AddNorm = std::function<torch::nn::AnyModule(torch::nn::Module& parent,
                                                   const std::string& name, int64_t channels)>;

/// Registers the parameter `name`.weight [to, from, side, side] in `parent`, uninitialised.
at::Tensor add_convolution(torch::nn::Module& parent, const std::string& name, int64_t from,
                           int64_t to, int64_t side);

/// relu(norm2(conv2(relu(norm1(conv1(x))))) + x). If `stride` is 2 or the number of channels
/// changes, the added x passes through a 1 x 1 convolution and a norm first. [B, from, H, W] to [B,
/// to, ⌈H/stride⌉, ⌈W/stride⌉].
class ResidualBlockImpl : public torch::nn::Module {
 public:
  ResidualBlockImpl(int64_t from, int64_t to, int64_t stride, const AddNorm& add_norm);
  at::Tensor forward(const at::Tensor& x);

 private:
  int64_t stride_;
  at::Tensor conv1_, conv2_, shortcut_;  // shortcut_ undefined: x is added unchanged
  torch::nn::AnyModule norm1_, norm2_, shortcut_norm_;
};

}  // namespace tessera
