#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "fsdp/models.h"
#include "harness/batches.h"
#include "harness/thrown_by.h"

namespace tessera::testing {

struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(int blocks = 5) {
    for (int i = 0; i < blocks; ++i) list->push_back(torch::nn::Linear(3, 3));
    register_module("list", list);
    head = register_module("head", torch::nn::Linear(3, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *list) x = torch::tanh(block->as<torch::nn::Linear>()->forward(x));
    return head(x);
  }
  torch::nn::ModuleList list;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Chain);

template <class Optimizer, class Net>
void step(Net& fsdp, Optimizer& optimizer, const at::Tensor& x) {
  optimizer.zero_grad();
  loss_of(fsdp(x)).backward();
  optimizer.step();
}

/// Trains a ResNet on images from step `from` on.
template <class Net, class Optimizer>
void train(Net& net, Optimizer& optimizer, int from, int to, int rank = 0, int world = 1) {
  for (int i = from; i < to; ++i) {
    optimizer.zero_grad();
    net(rgb_images(i, rank, world)).square().mean().backward();
    optimizer.step();
  }
}

}  // namespace tessera::testing
