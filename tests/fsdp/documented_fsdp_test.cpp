// The snippets of docs/fsdp.md and docs/memory.md; tests/integration/readme_test.py checks that
// they are equal.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adamw.h>

#include "harness/ranks.h"
#include "tessera/tessera.h"

namespace documented {
namespace {

struct BlockImpl : torch::nn::Module {
  BlockImpl() { linear = register_module("linear", torch::nn::Linear(3, 3)); }
  torch::Tensor forward(torch::Tensor x) { return torch::tanh(linear(x)); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() { blocks = register_module("blocks", torch::nn::Sequential(Block(), Block())); }
  torch::Tensor forward(torch::Tensor x) { return blocks->forward(x); }
  torch::nn::Sequential blocks{nullptr};
};
TORCH_MODULE(Net);

TEST(Documented, Fsdp) {
  tessera::testing::run_ranks(2, [](tessera::ProcessGroup world, int) {
    const auto x = torch::ones({4, 3});
    // [documented]
    Net net;  // any module, as it is
    tessera::FullyShardedDataParallel fsdp(net, world,
                                           {.wrap_policy = tessera::wrap_by_type<BlockImpl>()});
    torch::optim::AdamW optimizer(fsdp.parameters(),
                                  3e-4);  // this rank's shards, not net->parameters()
    auto loss = fsdp(x).sum();
    loss.backward();
    fsdp.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
    // [end]
    EXPECT_EQ(fsdp.units().size(), 3u);
    EXPECT_EQ(fsdp.stats().reductions, 2u);
  });
}

// The snippet of docs/memory.md.
TEST(Documented, DeferredConstruction) {
  tessera::testing::run_ranks(2, [](tessera::ProcessGroup world, int) {
    // [documented]
    auto net = tessera::deferred_init([] { return Net(); });  // parameters take no memory
    tessera::FullyShardedDataParallel fsdp(net, world,
                                           {.wrap_policy = tessera::wrap_by_type<BlockImpl>()});
    // [end]
    EXPECT_EQ(fsdp(torch::ones({4, 3})).size(0), 4);
  });
}

}  // namespace
}  // namespace documented
