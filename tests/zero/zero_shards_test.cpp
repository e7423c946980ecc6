#include <atomic>

#include "harness/slices.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "zero/zero_harness.h"

// What a rank holds, and what goes in and out of it: shards, slices, values.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;

std::vector<ZeroOptions> all_ways() {
  std::vector<ZeroOptions> result;
  for (const auto partition : kPartitions) {
    for (const bool shard : {false, true}) {
      for (const bool view : {true, false}) {
        result.push_back({.partition = partition,
                          .parameters_as_bucket_view = view,
                          .bucket_cap_mb = 40.0 / (1 << 20),
                          .shard_gradients = shard});
      }
    }
  }
  return result;
}

template <class Net, class Stepper>
void train(Net& net, Stepper& stepper, int from, int to, int rank, int world) {
  for (int step = from; step < to; ++step) {
    stepper.zero_grad();
    if constexpr (std::is_same_v<Net, Mixed>) loss_of(net(images(step, rank, world))).backward();
    else loss_of(net(rows(step, rank, world))).backward();
    stepper.step();
  }
}

/// Two groups with options of their own.
std::vector<Zero::Group> two_groups(const Uneven& net) {
  std::vector<Zero::Group> groups(2);
  for (const auto& [name, tensor] : named_parameters(*net))
    groups[name.rfind("second", 0) == 0].parameters.emplace_back(name, tensor);
  groups[1].options = {{"lr", 0.002}, {"weight_decay", 0.25}};
  return groups;
}

TEST(ZeroShards, CoverEveryElementOnceWithTheParametersValues) {
  for (const auto& options : all_ways()) {
    for (int world = 1; world <= 4; ++world) {
      SlicePool values, expected;
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Mixed>(1);
        Zero zero(*net, group, factory("AdamW"), options);
        const auto shards = zero.shards();
        values.add_values(shards);
        if (rank == 0) expected.add_values(parameter_shards(named_parameters(*net)));
        int64_t owned = 0, held = 0;
        for (const auto& shard : zero.shards()) owned += shard.numel;
        for (const auto& shard : shards) {
          EXPECT_GT(shard.numel, 0);
          EXPECT_EQ(shard.shape, net->named_parameters()[shard.parameter].sizes().vec());
          EXPECT_EQ(shard.numel, shard.tensor.numel());
          held += shard.numel;
        }
        EXPECT_EQ(held, owned);
        const auto order = named_parameters(*net);
        const auto place = [&](const ParameterShard& shard) {
          return std::find_if(order.begin(), order.end(),
                              [&](const auto& entry) { return entry.first == shard.parameter; });
        };
        EXPECT_TRUE(std::is_sorted(shards.begin(), shards.end(), [&](const auto& a, const auto& b) {
          return place(a) < place(b);
        }));
      });
      values.expect_equal(expected);
    }
  }
}

/// `Net` trained by DDP for two steps, on its way through ZeRO, any number of ranks.
template <class Net>
void from_ddp_through_zero(Partition partition) {
  SlicePool state, values;
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Net>(1);
    DistributedDataParallel ddp(net, group);
    const auto optimizer = factory("AdamW")({torch::optim::OptimizerParamGroup(net->parameters())});
    train(net, *optimizer, 0, 2, rank, 2);
    if (rank != 0) return;
    const auto shards = parameter_shards(named_parameters(*net));
    state.add(state_slices(*optimizer, shards));
    values.add_values(shards);
  });
  for (int world = 1; world <= 4; ++world) {
    SlicePool sharded, restored, onwards, reference;
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Net>(2), whole = seeded<Net>(3);
      Zero zero(*net, group, factory("AdamW"), {.partition = partition});
      values.cut_values(zero.shards());
      zero.gather_parameters();
      zero.load_state_slices(state.cut(zero.shards()));
      sharded.add(zero.state_slices());
      DistributedDataParallel ddp(whole, group);
      const auto optimizer =
          factory("AdamW")({torch::optim::OptimizerParamGroup(whole->parameters())});
      const auto shards = parameter_shards(named_parameters(*whole));
      values.cut_values(shards);
      group.barrier();  // the pool has all ranks' slices
      load_state_slices(*optimizer, shards, sharded.cut(shards));
      if (rank == 0) restored.add(state_slices(*optimizer, shards));
      expect_same_weights(net, whole);
      // From here on both do the same.
      train(net, zero, 2, 4, rank, world);
      train(whole, *optimizer, 2, 4, rank, world);
      expect_same_weights(net, whole);
      onwards.add(zero.state_slices());
      if (rank == 0) reference.add(state_slices(*optimizer, shards));
    });
    sharded.expect_equal(state);
    restored.expect_equal(state);
    onwards.expect_equal(reference);
  }
}

TEST(ZeroShards, StateGoesFromDdpThroughZeroAndBackBitByBit) {
  for (const auto partition : kPartitions) {
    from_ddp_through_zero<Uneven>(partition);
    from_ddp_through_zero<Mixed>(partition);
  }
}

TEST(ZeroShards, ADistributedOptimizersStateIsDdps) {
  SlicePool ddps, distributed;
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1), other = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group);
    const auto optimizer = factory("AdamW")({torch::optim::OptimizerParamGroup(net->parameters())});
    DistributedOptimizer dist(*other, group, factory("AdamW"), {.reduce_method = "mean"});
    train(net, *optimizer, 0, 2, rank, 2);
    train(other, dist, 0, 2, rank, 2);
    if (rank != 1) return;
    ddps.add(state_slices(*optimizer, parameter_shards(named_parameters(*net))));
    distributed.add(state_slices(dist.optimizer(), parameter_shards(named_parameters(*other))));
  });
  distributed.expect_equal(ddps);
}

TEST(ZeroShards, AResumedRunIsTheUninterruptedOneWithItsGroups) {
  for (const auto& options : all_ways()) {
    run_ranks(3, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1), resumed = seeded<Uneven>(2);
      Zero zero(two_groups(net), group, factory("AdamW"), options),
          fresh(two_groups(resumed), group, factory("AdamW"), options);
      train(net, zero, 0, 2, rank, 3);
      zero.param_groups()[1].options().set_lr(0.125);  // as a scheduler does
      const auto groups = zero.groups();
      ASSERT_EQ(groups.size(), 2u);
      EXPECT_EQ(groups[1].parameters, (std::vector<std::string>{"second.weight", "second.bias"}));
      EXPECT_EQ(groups[1].options.at("lr"), OptionValue(0.125));
      EXPECT_EQ(groups[0].options.at("lr"), OptionValue(0.05));
      const auto from = zero.shards(), to = fresh.shards();
      ASSERT_EQ(from.size(), to.size());
      for (size_t i = 0; i < from.size(); ++i) {
        torch::NoGradGuard no_grad;
        to[i].tensor.copy_(from[i].tensor);
      }
      fresh.gather_parameters();
      fresh.load_state_slices(zero.state_slices());
      EXPECT_EQ(fresh.groups()[1].options.at("lr"), OptionValue(0.002)) << "options are not state";
      for (size_t g = 0; g < groups.size(); ++g)
        set_options(fresh.param_groups()[g].options(), groups[g].options);
      train(net, zero, 2, 4, rank, 3);
      train(resumed, fresh, 2, 4, rank, 3);
      expect_same_weights(net, resumed);
      EXPECT_EQ(fresh.groups()[1].options.at("lr"), OptionValue(0.125));
    });
  }
}

TEST(ZeroShards, KeepAParameterThatIsFrozenForATime) {
  std::atomic<int> found = 0;
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    Zero zero(*net, group, factory("AdamW"));
    train(net, zero, 0, 2, rank, 2);
    net->second->weight.requires_grad_(false);
    train(net, zero, 2, 3, rank, 2);
    auto slices = zero.state_slices();
    zero.load_state_slices(slices);
    net->second->weight.requires_grad_(true);
    train(net, zero, 3, 4, rank, 2);
    for (const auto& slice : zero.state_slices()) {
      if (slice.parameter == "second.weight") {
        EXPECT_EQ(std::get<int64_t>(slice.state.scalars.at("step")), 3);
        ++found;
      }
      if (slice.parameter == "first.weight")
        EXPECT_EQ(std::get<int64_t>(slice.state.scalars.at("step")), 4);
    }
  });
  EXPECT_GT(found, 0);
}

TEST(ZeroShards, WhatIsWrittenIntoThemReachesAllRanksInOneGatherABucket) {
  for (const auto& options : all_ways()) {
    for (int world = 1; world <= 4; ++world) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Mixed>(1);
        Zero zero(*net, group, factory("AdamW"), options);
        train(net, zero, 0, 1, rank, world);
        auto early = net(images(0)).sum();
        {
          torch::NoGradGuard no_grad;
          for (const auto& shard : zero.shards())
            shard.tensor.copy_(at::arange(shard.begin, shard.begin + shard.numel)
                                   .view({-1})
                                   .to(shard.tensor.dtype())
                                   .as_strided(shard.tensor.sizes(), shard.tensor.strides()));
        }
        group.barrier();
        group.reset_stats();
        zero.gather_parameters();
        const auto& stats = group.stats();
        if (!options.shard_gradients)
          EXPECT_EQ(stats.all_gather.calls, world > 1 ? 2u : 0u) << "one for each dtype";
        EXPECT_EQ(stats.calls(), stats.all_gather.calls);
        for (const auto& [name, tensor] : named_parameters(*net)) {
          const auto run = tensor.detach().as_strided({tensor.numel()}, {1});
          EXPECT_TRUE(at::equal(run, at::arange(tensor.numel()).to(run.dtype()))) << name;
        }
        EXPECT_THROW(early.backward(), c10::Error) << "through values that are gone";
      });
    }
  }
}

TEST(ZeroShards, SlicesThatDoNotFitNameParameterAndRankAndChangeNothing) {
  SlicePool before, after;
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    Zero zero(*net, group, factory("AdamW"));
    train(net, zero, 0, 2, rank, 2);
    before.add(zero.state_slices());
    SlicePool copies;
    copies.add(zero.state_slices());
    auto slices = zero.state_slices();
    const auto spoilt = slices.back().parameter;
    slices.back().state.tensors["exp_avg"] = at::zeros({3});
    for (auto& slice : slices) slice.state.scalars["step"] = int64_t{77};
    const auto who =
        "ZeroRedundancyOptimizer: rank " + std::to_string(rank) + ": load_state_slices: ";
    EXPECT_THAT(thrown_by([&] { zero.load_state_slices(slices); }),
                HasSubstr(who + "exp_avg of parameter " + spoilt));
    slices.pop_back();
    EXPECT_THAT(thrown_by([&] { zero.load_state_slices(slices); }),
                HasSubstr(who + "there is no slice of parameter " + spoilt));
    EXPECT_THAT(thrown_by([&] { zero.load_state_slices({}); }), HasSubstr("no slice of parameter"));
    after.add(zero.state_slices());
  });
  after.expect_equal(before);
}

}  // namespace
