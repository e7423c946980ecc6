// Layers with buffers.

#include <torch/nn.h>

#include "fuzz/training/model/blocks.h"

namespace tessera::fuzz {
namespace {

namespace nn = torch::nn;

template <class Norm>
class NormBlock : public Block {
 public:
  template <class Options>
  NormBlock(int in, const Options& options) : Block(in) {
    norm_ = register_module("norm", Norm(options));
  }
  at::Tensor run(const Flow& flow) override {
    return norm_(flow.hidden.transpose(1, 2)).transpose(1, 2);
  }

 private:
  Norm norm_{nullptr};
};

/// Counts its calls in training, and keeps a mean of what it saw, by which it shifts.
class CounterBlock : public Block {
 public:
  explicit CounterBlock(int in) : Block(in) {
    calls_ = register_buffer("calls", at::zeros({}, at::kLong));
    mean_ = register_buffer("mean", torch::randn({in}));
    scale_ = register_parameter("scale", torch::rand({in}) + 0.5);
  }
  at::Tensor run(const Flow& flow) override {
    if (is_training()) {
      at::NoGradGuard no_grad;
      calls_.add_(1);
      mean_.mul_(0.9).add_(flow.hidden.detach().mean(at::IntArrayRef({0, 1})), 0.1);
    }
    return (flow.hidden - mean_.clone()) * scale_;
  }

 private:
  at::Tensor calls_, mean_, scale_;
};

/// Projects by a random matrix that is a buffer, as random features do.
class RandomFeatures : public Block {
 public:
  RandomFeatures(int in, int out) : Block(out) {
    matrix_ = register_buffer("matrix", torch::randn({in, out}));
    shift_ = register_parameter("shift", torch::randn({out}));
  }
  at::Tensor run(const Flow& flow) override { return flow.hidden.matmul(matrix_) + shift_; }

 private:
  at::Tensor matrix_, shift_;
};

}  // namespace

std::shared_ptr<Block> make_stateful_block(const Item& which, int in) {
  const auto& kind = which.kind;
  if (kind == "batch_norm")
    return std::make_shared<NormBlock<nn::BatchNorm1d>>(
        in, nn::BatchNorm1dOptions(in).affine(!which.flag("plain")));
  if (kind == "cumulative_norm")
    return std::make_shared<NormBlock<nn::BatchNorm1d>>(
        in, nn::BatchNorm1dOptions(in).momentum(c10::nullopt));
  if (kind == "instance_norm")
    return std::make_shared<NormBlock<nn::InstanceNorm1d>>(
        in, nn::InstanceNorm1dOptions(in).affine(true).track_running_stats(true));
  if (kind == "counter") return std::make_shared<CounterBlock>(in);
  if (kind == "random_features")
    return std::make_shared<RandomFeatures>(in, which.number("out", in));
  return nullptr;
}

}  // namespace tessera::fuzz
