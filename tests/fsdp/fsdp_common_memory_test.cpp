// Ranks of one host keep their shards in common memory: see [Note: shards in common memory] in
// residency.h.

#include <chrono>
#include <thread>

#include <gtest/gtest.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "tessera/fully_sharded_data_parallel.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }

/// Uses its weight twice in forward and in backward. A rank can wait between the two uses.
struct SlowImpl : torch::nn::Module {
  SlowImpl() { weight = register_parameter("weight", at::ones({64})); }

  torch::Tensor forward(torch::Tensor x) {
    auto late = x * weight.detach();
    if (slow && late.requires_grad()) {
      late.register_hook([](const at::Tensor& gradient) {
        pause();
        return gradient;
      });
    }
    if (slow) pause();
    return late * weight;
  }
  torch::Tensor weight;
  bool slow = false;
};
TORCH_MODULE(Slow);

class FsdpCommonMemory : public ::testing::TestWithParam<int> {};

TEST_P(FsdpCommonMemory, AWriteDoesNotChangeParametersThatAForwardStillReads) {
  run_ranks(GetParam(), [](ProcessGroup group, int rank) {
    Slow net;
    net->slow = rank == 1;
    FullyShardedDataParallel fsdp(net, group);
    for (int i = 1; i < 4; ++i) {
      torch::NoGradGuard no_grad;
      const auto y = fsdp(at::ones({64}));
      EXPECT_TRUE(at::equal(y, at::full({64}, i * i)))
          << "rank " << rank << " step " << i << " " << y;
      for (auto shard : fsdp.parameters()) shard.add_(1);
    }
  });
}

TEST_P(FsdpCommonMemory, AWriteDoesNotChangeParametersThatABackwardStillReads) {
  run_ranks(GetParam(), [](ProcessGroup group, int rank) {
    Slow net;
    net->slow = rank == 1;
    FullyShardedDataParallel fsdp(net, group);
    for (int i = 1; i < 4; ++i) {
      const auto x = at::ones({64}).requires_grad_();
      fsdp(x).sum().backward();
      EXPECT_TRUE(at::equal(x.grad(), at::full({64}, i * i)))
          << "rank " << rank << " step " << i << " " << x.grad();
      torch::NoGradGuard no_grad;
      for (auto shard : fsdp.parameters()) shard.add_(1);
    }
  });
}

TEST_P(FsdpCommonMemory, AGatherCopiesNothing) {
  for (const auto backend : {Backend::Auto, Backend::TCP}) {
    ProcessGroupOptions options;
    options.backend = backend;
    std::vector<const void*> seen(GetParam());
    run_ranks(
        GetParam(),
        [&](ProcessGroup group, int rank) {
          Chain net(1);
          FullyShardedDataParallel fsdp(net, group);
          fsdp.call([&](Chain& inner) {
            const auto y = inner(rows(0));
            seen[rank] = inner->head->weight.data_ptr();
            return y;
          });
          EXPECT_EQ(group.stats().all_gather.calls, 1u);
        },
        options);
    for (int rank = 1; rank < GetParam(); ++rank)
      EXPECT_EQ(seen[rank] == seen[0], backend == Backend::Auto);
  }
}

TEST_P(FsdpCommonMemory, AForwardThatThrowsOnAllRanksDoesNotBlock) {
  run_ranks(GetParam(), [](ProcessGroup group, int rank) {
    Chain net(2);
    FullyShardedDataParallel fsdp(net, group, {.wrap_policy = wrap_leaves()});
    torch::optim::SGD optimizer(fsdp.parameters(), 0.1);
    for (int i = 0; i < 3; ++i) {
      EXPECT_THROW(fsdp(at::ones({2, 7})), c10::Error);
      {
        torch::NoGradGuard no_grad;
        EXPECT_THROW(fsdp(at::ones({2, 7})), c10::Error);
      }
      step(fsdp, optimizer, rows(i));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, FsdpCommonMemory, ::testing::Values(2, 3, 4));

}  // namespace
