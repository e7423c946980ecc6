#include <atomic>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/slices.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"

// Shards and slices of a rank: reading, writing, loading; clipping by value.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;

std::unique_ptr<torch::optim::Optimizer> optimizer_over(const std::vector<at::Tensor>& parameters,
                                                        const std::string& name = "AdamW") {
  return default_optimizers().factory(
      name, {{"lr", 0.05}})({torch::optim::OptimizerParamGroup(parameters)});
}

template <class Net>
void train_some(Net& net, torch::optim::Optimizer& optimizer, int from, int to, int rank,
                int world) {
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    loss_of(net(rows(step, rank, world))).backward();
    optimizer.step();
  }
}

std::vector<FullyShardedDataParallelOptions> strategies(int world) {
  std::vector<FullyShardedDataParallelOptions> result;
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op,
                              ShardingStrategy::no_shard, ShardingStrategy::hybrid_shard}) {
    if (strategy == ShardingStrategy::hybrid_shard && world % 2 != 0) continue;
    auto options = every_leaf();
    options.sharding_strategy = strategy;
    options.shard_group_size = strategy == ShardingStrategy::hybrid_shard ? 2 : 0;
    result.push_back(options);
  }
  return result;
}

TEST(FsdpShards, TheFirstReplicaHasEveryTrainableElementOnce) {
  for (int world = 1; world <= 4; ++world) {
    for (const auto& options : strategies(world)) {
      std::vector<SlicePool> replicas(world);
      SlicePool expected;
      std::atomic<int> first{0};
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Mixed>(1), plain = seeded<Mixed>(1);
        for (auto* one : {&net, &plain}) (*one)->conv->bias.requires_grad_(false);
        FullyShardedDataParallel fsdp(net, group, options);
        if (rank == 0) expected.add_values(parameter_shards(named_parameters(*plain)));
        const int size = options.sharding_strategy == ShardingStrategy::no_shard       ? 1
                         : options.sharding_strategy == ShardingStrategy::hybrid_shard ? 2
                                                                                       : world;
        EXPECT_EQ(fsdp.first_replica(), rank < size);
        first += fsdp.first_replica();
        for (const auto& shard : fsdp.shards()) {
          EXPECT_GT(shard.numel, 0);
          EXPECT_NE(shard.parameter, "conv.bias");
        }
        replicas[rank / size].add_values(fsdp.shards());
      });
      EXPECT_GE(first, 1);
      for (auto& replica : replicas)
        if (!replica.empty()) replica.expect_equal(expected);
      EXPECT_FALSE(replicas[0].empty());
    }
  }
}

TEST(FsdpShards, StateGoesFromDdpThroughFsdpAndZeroAndBackBitByBit) {
  SlicePool state, values;
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group);
    const auto optimizer = optimizer_over(net->parameters());
    train_some(net, *optimizer, 0, 2, rank, 2);
    if (rank != 0) return;
    const auto shards = parameter_shards(named_parameters(*net));
    state.add(state_slices(*optimizer, shards));
    values.add_values(shards);
  });
  for (int world = 1; world <= 4; ++world) {
    for (const auto& options : strategies(world)) {
      SlicePool held, held_values, sharded, restored, expected;
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(2), other = seeded<Uneven>(3), whole = seeded<Uneven>(4);
        FullyShardedDataParallel fsdp(net, group, options);
        const auto optimizer = optimizer_over(fsdp.parameters());
        values.cut_values(fsdp.shards());
        load_state_slices(*optimizer, fsdp.shards(), state.cut(fsdp.shards()));
        if (fsdp.first_replica()) {
          held.add(state_slices(*optimizer, fsdp.shards()));
          held_values.add_values(fsdp.shards());
        }
        group.barrier();
        ZeroRedundancyOptimizer zero(*other, group,
                                     default_optimizers().factory("AdamW", {{"lr", 0.05}}));
        zero.load_state_slices(held.cut(zero.shards()));
        sharded.add(zero.state_slices());
        group.barrier();
        const auto reference = optimizer_over(whole->parameters());
        const auto shards = parameter_shards(named_parameters(*whole));
        held_values.cut_values(shards);
        load_state_slices(*reference, shards, sharded.cut(shards));
        if (rank == 0) restored.add(state_slices(*reference, shards));
        // From here on both compute the same, except for the order of sums.
        train_some(fsdp, *optimizer, 2, 4, rank, world);
        train_some(whole, *reference, 2, 4, 0, 1);
        for (const auto& [name, value] : fsdp.state_dict(-1))
          ASSERT_TRUE(at::allclose(value, whole->named_parameters()[name], 1e-4, 1e-5))
              << name << " world " << world;
      });
      held.expect_equal(state);
      held_values.expect_equal(values);
      sharded.expect_equal(state);
      restored.expect_equal(state);
    }
  }
}

TEST(FsdpShards, ValuesWrittenToShardsAreUsedFromTheNextForwardOn) {
  for (int world = 1; world <= 4; ++world) {
    for (auto options : strategies(world)) {
      for (const int64_t resident : {int64_t{0}, int64_t{1} << 20}) {
        options.resident_bytes = resident;
        run_ranks(world, [&](ProcessGroup group, int rank) {
          auto net = seeded<Uneven>(1), plain = seeded<Uneven>(1);
          FullyShardedDataParallel fsdp(net, group, options);
          const auto x = rows(0, 0, 1);
          const auto evaluate = [&](auto& model) {
            torch::NoGradGuard no_grad;
            return model(x);
          };
          const auto before = evaluate(fsdp);
          EXPECT_TRUE(at::equal(before, evaluate(plain)));
          const auto add = [](const at::Tensor& tensor, double number) {
            torch::NoGradGuard no_grad;
            tensor.add_(number);
          };
          for (const auto& shard : fsdp.shards()) add(shard.tensor, 0.25);
          for (const auto& parameter : plain->parameters()) add(parameter, 0.25);
          EXPECT_TRUE(at::equal(evaluate(fsdp), evaluate(plain)));
          EXPECT_FALSE(at::equal(evaluate(fsdp), before));
          // A write on one rank only: the other ranks must also use the new value.
          const auto name = "second.bias";
          bool mine = false;
          for (const auto& shard : fsdp.shards()) {
            if (shard.parameter != name || shard.begin != 0) continue;
            add(shard.tensor[0], 1);
            mine = true;
          }
          add(plain->second->bias[0], 1);
          EXPECT_TRUE(at::equal(evaluate(fsdp), evaluate(plain))) << (mine ? "writer" : "reader");
        });
      }
    }
  }
}

TEST(FsdpShards, ALoadedStateIsNotMixedWithThatOfEmptyShards) {
  run_ranks(4, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    const auto optimizer = optimizer_over(fsdp.parameters());
    train_some(fsdp, *optimizer, 0, 2, rank, 4);
    auto slices = state_slices(*optimizer, fsdp.shards());
    for (auto& slice : slices) slice.state.scalars["step"] = int64_t{50};
    load_state_slices(*optimizer, fsdp.shards(), slices);
    for (const auto& [name, state] : fsdp.optim_state_dict(*optimizer, -1).state)
      EXPECT_EQ(std::get<int64_t>(state.scalars.at("step")), 50) << name;
  });
}

TEST(FsdpClipValue, EqualsThePlainModelWithAndWithoutNormClipping) {
  for (const bool with_norm : {false, true}) {
    for (int world = 1; world <= 4; ++world) {
      for (const auto& options : strategies(world)) {
        run_ranks(world, [&](ProcessGroup group, int rank) {
          auto net = seeded<Uneven>(1), plain = seeded<Uneven>(1);
          FullyShardedDataParallel fsdp(net, group, options);
          const auto optimizer = optimizer_over(fsdp.parameters(), "SGD"),
                     reference = optimizer_over(plain->parameters(), "SGD");
          fsdp.clip_grad_value_(0.01);  // no gradients yet
          for (int step = 0; step < 3; ++step) {
            optimizer->zero_grad();
            reference->zero_grad();
            {
              auto scope = fsdp.no_sync();
              loss_of(fsdp(rows(2 * step, rank, world))).backward();
            }
            loss_of(fsdp(rows(2 * step + 1, rank, world))).backward();
            (loss_of(plain(rows(2 * step, 0, 1))) + loss_of(plain(rows(2 * step + 1, 0, 1))))
                .backward();
            if (with_norm) {
              fsdp.clip_grad_norm_(0.1);
              torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.1);
            }
            const auto calls = group.stats().calls();
            fsdp.clip_grad_value_(0.01);
            EXPECT_EQ(group.stats().calls(), calls) << "nothing is sent";
            torch::nn::utils::clip_grad_value_(plain->parameters(), 0.01);
            optimizer->step();
            reference->step();
          }
          for (const auto& [name, value] : fsdp.state_dict(-1))
            ASSERT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-5, 1e-6))
                << name << " world " << world;
        });
      }
    }
  }
}

TEST(FsdpClipValue, MisuseIsRefused) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    const auto refusal_of = [&](double value) {
      return thrown_by([&] { fsdp.clip_grad_value_(value); });
    };
    EXPECT_THAT(refusal_of(-1), HasSubstr("rank " + std::to_string(rank) +
                                          ": clip_value is -1; expected 0 or more"));
    EXPECT_THAT(refusal_of(std::numeric_limits<double>::quiet_NaN()),
                HasSubstr("clip_value is nan"));
    EXPECT_EQ(refusal_of(std::numeric_limits<double>::infinity()), "no error");
    EXPECT_EQ(refusal_of(0), "no error");
    const auto scope = fsdp.summon_full_params();
    EXPECT_THAT(refusal_of(1),
                HasSubstr("clip_grad_value_ was called inside summon_full_params()"));
  });
}

}  // namespace
