#include <functional>
#include <future>

#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/fully_sharded_data_parallel.h"

// Option overlap of FullyShardedDataParallel. See [Note: late gradients].

namespace {

using namespace tessera;
using namespace tessera::testing;
using Options = FullyShardedDataParallelOptions;

constexpr std::chrono::seconds kLimit{60};

Options with(Overlap overlap) {
  auto options = every_leaf();
  options.overlap = overlap;
  return options;
}

/// Rank 1 computes its last gradient when `go` is set.
struct LastGradientWaits {
  void attach(Chain& net, int rank) {
    if (rank != 1) return;
    const auto& first = net->list[0]->as<torch::nn::Linear>()->weight;
    first.register_hook([this](const at::Tensor& grad) {
      EXPECT_EQ(go.get_future().wait_for(kLimit), std::future_status::ready);
      return grad;
    });
  }
  std::promise<void> go;
};

/// What is done with the gradients that have not arrived.
using Use = std::function<void(FullyShardedDataParallel<Chain>& fsdp)>;

void expect_waits(const Use& use) {
  auto plain = seeded<Chain>(1);
  loss_of(plain(rows(0))).backward();
  LastGradientWaits last;
  run_ranks_on({0, 1}, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1);
    auto options = with(Overlap::background);
    FullyShardedDataParallel fsdp(net, group, options);
    last.attach(net, rank);
    loss_of(fsdp(rows(0, rank, 2))).backward();
    if (rank == 0) {
      EXPECT_GT(fsdp.stats().gradient_bytes, 0) << "the last reduction has ended";
      last.go.set_value();
    }
    use(fsdp);
    EXPECT_EQ(fsdp.stats().gradient_bytes, 0);
    const auto shards = fsdp.shards();
    ASSERT_FALSE(shards.empty());
    for (const auto& shard : shards) {
      const auto whole = plain->named_parameters()[shard.parameter].grad();
      const auto own = whole.flatten().narrow(0, shard.begin, shard.tensor.numel());
      EXPECT_TRUE(at::allclose(shard.tensor.grad(), own)) << shard.parameter;
    }
  });
}

TEST(FsdpBackground, BackwardReturnsBeforeTheLastReductionAndAnOperatorWaits) {
  expect_waits([](auto& fsdp) {
    for (const auto& shard : fsdp.parameters()) shard.grad().sum();
  });
}

TEST(FsdpBackground, WaitIsForCodeWithPointers) {
  expect_waits([](auto& fsdp) {
    fsdp.wait();
    for (const auto& shard : fsdp.shards()) EXPECT_NE(shard.tensor.grad().data_ptr(), nullptr);
  });
}

TEST(FsdpBackground, ClippingWaits) {
  expect_waits([](auto& fsdp) { fsdp.clip_grad_norm_(INFINITY); });
}

TEST(FsdpBackground, TheNextForwardWaits) {
  expect_waits([](auto& fsdp) {
    const torch::NoGradGuard no_grad;
    fsdp(rows(0));
  });
}

TEST(FsdpBackground, GradientsThatAreDroppedDoNotReturn) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    FullyShardedDataParallel fsdp(seeded<Chain>(1), group, with(Overlap::background));
    loss_of(fsdp(rows(0, rank, 2))).backward();
    for (auto& shard : fsdp.parameters()) shard.mutable_grad() = at::Tensor();
    fsdp.wait();
    for (const auto& shard : fsdp.parameters()) EXPECT_FALSE(shard.grad().defined());
  });
}

TEST(FsdpBackground, TheModuleSetsGradientsToZeroThatHaveNotArrived) {
  LastGradientWaits last;
  run_ranks_on({0, 1}, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, with(Overlap::background));
    last.attach(net, rank);
    loss_of(fsdp(rows(0, rank, 2))).backward();
    if (rank == 0) last.go.set_value();
    net->zero_grad(/*set_to_none=*/false);
    for (const auto& shard : fsdp.parameters())
      EXPECT_EQ(shard.grad().count_nonzero().item<int>(), 0);
  });
}

/// The weights after some steps, with no_sync() and hooks on shards in between.
std::vector<at::Tensor> trained(Overlap overlap, ProcessGroup group, int rank,
                                ShardingStrategy strategy) {
  auto net = seeded<Chain>(1);
  auto options = with(overlap);
  options.sharding_strategy = strategy;
  if (strategy == ShardingStrategy::hybrid_shard) options.shard_group_size = 2;
  FullyShardedDataParallel fsdp(net, group, options);
  torch::optim::SGD optimizer(fsdp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int i = 0; i < 6; ++i) {
    optimizer.zero_grad();
    if (i == 2) {
      const auto accumulate = fsdp.no_sync();
      loss_of(fsdp(rows(i, rank, group.size()))).backward();
    }
    if (i == 4) fsdp.parameters()[0].register_hook([](const at::Tensor& grad) { return 2 * grad; });
    loss_of(fsdp(rows(i, rank, group.size()))).backward();
    if (i == 3) loss_of(fsdp(rows(i + 1, rank, group.size()))).backward();
    if (i == 5) fsdp.clip_grad_norm_(0.1);
    optimizer.step();
  }
  const auto whole = fsdp.summon_full_params();
  return copies(net->parameters());
}

TEST(FsdpOverlap, EveryValueGivesTheSameBits) {
  for (const auto strategy :
       {ShardingStrategy::full_shard, ShardingStrategy::hybrid_shard, ShardingStrategy::no_shard}) {
    run_ranks_on({0, 0, 1, 1}, [&](ProcessGroup group, int rank) {
      const auto expected = trained(Overlap::backward, group, rank, strategy);
      for (const auto overlap : {Overlap::none, Overlap::background}) {
        const auto weights = trained(overlap, group, rank, strategy);
        for (size_t i = 0; i < weights.size(); ++i)
          EXPECT_TRUE(at::equal(weights[i], expected[i])) << i;
      }
    });
  }
}

TEST(FsdpOverlap, NonePrefetchesNothing) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    FullyShardedDataParallel fsdp(seeded<Chain>(1), group, with(Overlap::none));
    torch::optim::SGD optimizer(fsdp.parameters(), 0.1);
    for (int i = 0; i < 3; ++i) step(fsdp, optimizer, rows(i, rank, 2));
    EXPECT_EQ(fsdp.stats().prefetches, 0u);
    EXPECT_EQ(fsdp.stats().peak_gradient_bytes, 12 * 4) << "one reduction at a time";
  });
}

}  // namespace
