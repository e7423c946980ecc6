#include "models/residual_block.h"

namespace tessera {

at::Tensor add_convolution(torch::nn::Module& parent, const std::string& name, int64_t from,
                           int64_t to, int64_t side) {
  // torch::nn::Conv2d would draw from the global generator in its constructor.
  const auto holder =
      parent.register_module(name, std::make_shared<torch::nn::Module>("Convolution"));
  return holder->register_parameter("weight", at::empty({to, from, side, side}));
}

ResidualBlockImpl::ResidualBlockImpl(int64_t from, int64_t to, int64_t stride,
                                     const AddNorm& add_norm)
    : stride_(stride) {
  conv1_ = add_convolution(*this, "conv1", from, to, 3);
  norm1_ = add_norm(*this, "norm1", to);
  conv2_ = add_convolution(*this, "conv2", to, to, 3);
  norm2_ = add_norm(*this, "norm2", to);
  if (stride != 1 || from != to) {
    shortcut_ = add_convolution(*this, "shortcut", from, to, 1);
    shortcut_norm_ = add_norm(*this, "shortcut_norm", to);
  }
}

at::Tensor ResidualBlockImpl::forward(const at::Tensor& x) {
  at::Tensor y = at::relu(norm1_.forward(at::conv2d(x, conv1_, {}, stride_, 1)));
  y = norm2_.forward(at::conv2d(y, conv2_, {}, 1, 1));
  const at::Tensor direct =
      shortcut_.defined() ? shortcut_norm_.forward(at::conv2d(x, shortcut_, {}, stride_)) : x;
  return at::relu(y + direct);
}

}  // namespace tessera
