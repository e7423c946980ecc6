#pragma once

#include <functional>
#include <string>

#include "tessera/models/image_classifier.h"

namespace tessera {

/// Makes the layer after a convolution of so many channels, as an element `name` of `parent`.
using AddNorm = std::function<torch::nn::AnyModule(torch::nn::Module& parent,
                                                   const std::string& name, int64_t channels)>;

/// One parameter, `name`.weight [to, from, side, side], uninitialised.
at::Tensor add_convolution(torch::nn::Module& parent, const std::string& name, int64_t from,
                           int64_t to, int64_t side);

/// relu(norm2(conv2(relu(norm1(conv1(x))))) + x); where `stride` is 2 or the channels change, x
/// passes a 1 x 1 convolution and a norm of its own. [B, from, H, W] to [B, to, ⌈H/stride⌉,
/// ⌈W/stride⌉].
class ResidualBlockImpl : public torch::nn::Module {
 public:
  ResidualBlockImpl(int64_t from, int64_t to, int64_t stride, const AddNorm& add_norm);
  at::Tensor forward(const at::Tensor& x);

 private:
  int64_t stride_;
  at::Tensor conv1_, conv2_, shortcut_;  // shortcut_ undefined: x itself
  torch::nn::AnyModule norm1_, norm2_, shortcut_norm_;
};

}  // namespace tessera
