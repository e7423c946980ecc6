#pragma once

#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "tessera/process_group.h"

namespace tessera::testing {

/// A batch norm and a linear layer, for rows of 3 numbers. Training changes its buffers.
struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : norm(register_module("norm", torch::nn::BatchNorm1d(3))),
        linear(register_module("linear", torch::nn::Linear(3, 2))) {}
  torch::Tensor forward(torch::Tensor x) { return linear(norm(x)); }
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear linear;
};
TORCH_MODULE(Normed);

/// All ranks have the same buffers, and there are some. Collective.
inline void expect_equal_buffers(const torch::nn::Module& module, ProcessGroup group) {
  EXPECT_FALSE(module.buffers().empty());
  for (const auto& buffer : module.named_buffers()) {
    const auto all = group.all_gather(buffer.value()).view({group.size(), -1});
    for (int rank = 1; rank < group.size(); ++rank)
      EXPECT_TRUE(at::equal(all[rank], all[0])) << buffer.key() << " of rank " << rank;
  }
}

}  // namespace tessera::testing
