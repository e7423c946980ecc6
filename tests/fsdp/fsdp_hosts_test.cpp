#include <chrono>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/fully_sharded_data_parallel.h"

// FullyShardedDataParallel on several hosts. Hybrid sharding without a shard_group_size shards
// inside each host and replicates across hosts. Otherwise gathers and reductions take turns in two
// groups: see [Note: lanes].

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::Each;
using ::testing::HasSubstr;
using Options = FullyShardedDataParallelOptions;
using Tensors = std::vector<at::Tensor>;

FullyShardedDataParallelOptions hybrid() {
  auto options = every_leaf();
  options.sharding_strategy = ShardingStrategy::hybrid_shard;
  return options;
}

/// The message of what each rank threw in constructing a model on these hosts.
std::vector<std::string> errors_on(const std::vector<int>& hosts) {
  const auto errors = run_ranks_catching(
      static_cast<int>(hosts.size()),
      [](ProcessGroup group, int) {
        FullyShardedDataParallel fsdp(seeded<Chain>(1), group, hybrid());
      },
      {}, hosts);
  std::vector<std::string> messages;
  for (const auto& error : errors) messages.push_back(message_of(error));
  return messages;
}

TEST(FsdpHosts, HybridShardShardsWithinAHost) {
  run_ranks_on({0, 0, 1, 1}, [](ProcessGroup group, int rank) {
    FullyShardedDataParallel fsdp(seeded<Chain>(1), group, hybrid());
    EXPECT_EQ(fsdp.first_replica(), rank < 2);
    auto explicit_size = hybrid();
    explicit_size.shard_group_size = 2;
    FullyShardedDataParallel same(seeded<Chain>(1), group, explicit_size);
    ASSERT_EQ(fsdp.units().size(), same.units().size());
    for (size_t u = 0; u < fsdp.units().size(); ++u)
      EXPECT_EQ(fsdp.units()[u].sharded_bytes, same.units()[u].sharded_bytes) << u;
  });
}

TEST(FsdpHosts, HybridShardOnOneHostShardsOverAllRanks) {
  run_ranks_on({0, 0, 0}, [](ProcessGroup group, int) {
    FullyShardedDataParallel fsdp(seeded<Chain>(1), group, hybrid());
    EXPECT_TRUE(fsdp.first_replica());
  });
}

TEST(FsdpHosts, HostsOfUnequalSizeAreAnErrorOnEveryRank) {
  EXPECT_THAT(
      errors_on({0, 0, 1}),
      Each(HasSubstr("shard_group_size is 0, but the ranks are not placed on hosts of equal "
                     "size: rank 2 is local rank 0 of 1 on its host, expected local rank 0 "
                     "of 2")));
  EXPECT_THAT(errors_on({0, 0, 1, 2}), Each(HasSubstr("rank 2 is local rank 0 of 1")));
}

TEST(FsdpHosts, RanksOfAHostThatAreNotConsecutiveAreAnErrorOnEveryRank) {
  EXPECT_THAT(
      errors_on({0, 1, 0, 1}),
      Each(HasSubstr("rank 1 is local rank 0 of 2 on its host, expected local rank 1 of 2")));
}

/// Layers of which each is more than the 64 KiB up to which a gather takes another way.
struct DeepImpl : torch::nn::Module {
  DeepImpl() {
    first = register_module("first", torch::nn::Linear(kColumns, 160));
    for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(160, 160));
    register_module("layers", layers);
    last = register_module("last", torch::nn::Linear(160, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(first(x));
    for (const auto& layer : *layers) x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return last(x);
  }
  static constexpr int64_t kColumns = 3;
  torch::nn::ModuleList layers;
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(Deep);

/// Trains on these hosts, with an accumulated step and an evaluation between steps, and returns
/// the parameters on rank 0.
Tensors trained(const std::vector<int>& hosts, const Options& options) {
  Tensors result;
  run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
    auto net = seeded<Deep>(3);
    FullyShardedDataParallel fsdp(net, group, options);
    torch::optim::AdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      if (step == 2) {
        const auto held = fsdp.no_sync();
        loss_of(fsdp(rows(9, rank, group.size()))).backward();
      }
      loss_of(fsdp(rows(step, rank, group.size()))).backward();
      fsdp.clip_grad_norm_(1.0);
      optimizer.step();
      const at::NoGradGuard no_grad;
      fsdp(rows(step, rank, group.size()));
    }
    const auto whole = fsdp.summon_full_params();
    if (rank != 0) return;
    for (const auto& parameter : net->parameters()) result.push_back(parameter.detach().clone());
  });
  return result;
}

TEST(FsdpLanes, TrainWithTheBitsOfOneHost) {
  auto small = every_leaf(), whole = every_leaf(), rounded = every_leaf();
  small.resident_bytes = 1;
  whole.sharding_strategy = ShardingStrategy::shard_grad_op;
  rounded.mixed_precision.param_dtype = at::kBFloat16;
  for (const auto& hosts : std::vector<std::vector<int>>{{0, 1}, {0, 1, 1}, {0, 0, 1, 1}}) {
    for (const auto& options : {every_leaf(), small, whole, rounded, Options()}) {
      const auto alone = trained(std::vector<int>(hosts.size(), 0), options);
      const auto apart = trained(hosts, options);
      ASSERT_EQ(alone.size(), 12U);
      for (size_t i = 0; i < alone.size(); ++i)
        EXPECT_TRUE(at::equal(alone[i], apart[i])) << i << ::testing::PrintToString(hosts);
    }
  }
}

TEST(FsdpLanes, TheNextTwoUnitsAreGatheredWhileOneComputes) {
  run_ranks_on({0, 0, 1, 1}, [](ProcessGroup group, int rank) {
    FullyShardedDataParallel fsdp(seeded<Deep>(3), group, every_leaf());
    torch::optim::SGD optimizer(fsdp.parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      fsdp.reset_stats();
      group.reset_stats();
      loss_of(fsdp(rows(step, rank, 4))).backward();
      optimizer.step();
    }
    // Three units fit. Of the six, two are gathered again: backward does not use the first
    // one's weight, because the input needs no gradient.
    const int64_t layer = 4 * (160 * 160 + 160);
    EXPECT_EQ(fsdp.stats().peak_gathered_bytes, 3 * layer);
    EXPECT_EQ(fsdp.stats().gathers_forward, 6U);
    EXPECT_EQ(fsdp.stats().gathers_backward, 2U);
    EXPECT_EQ(fsdp.stats().prefetches, 5U + 2U);
    EXPECT_EQ(fsdp.stats().reductions, 6U);
    EXPECT_EQ(group.stats().all_gather.calls, 8U) << "the lanes count in the group";
    EXPECT_EQ(group.stats().reduce_scatter.calls, 6U);
    EXPECT_EQ(group.stats().barrier.calls, 0U);
  });
}

/// In the last step rank 1 calls another collective than rank 0: before its forward or after it.
void expect_notice(const Options& options, int last, bool before_forward) {
  const auto begin = std::chrono::steady_clock::now();
  const auto errors =
      run_ranks_catching(2,
                         [&](ProcessGroup group, int rank) {
                           FullyShardedDataParallel fsdp(seeded<Deep>(3), group, options);
                           for (int step = 0; step <= last; ++step) {
                             const bool differs = step == last && rank == 1;
                             auto metric = at::ones({1});
                             if (differs && before_forward) group.all_reduce(metric);
                             const auto loss = loss_of(fsdp(rows(step, rank, 2)));
                             if (differs && !before_forward) group.all_reduce(metric);
                             loss.backward();
                           }
                           group.barrier();
                         },
                         {.timeout = std::chrono::seconds(60)}, {0, 1});
  expect_usage_errors(errors, "all_reduce");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

TEST(FsdpLanes, ARankWithAnotherCollectiveIsNoticedAtOnce) {
  auto whole = every_leaf();
  whole.sharding_strategy = ShardingStrategy::shard_grad_op;
  for (const auto& options : {every_leaf(), whole, Options()}) {
    for (const int last : {1, 2})
      for (const bool before_forward : {false, true}) expect_notice(options, last, before_forward);
  }
}

}  // namespace
