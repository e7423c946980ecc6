#include <gtest/gtest.h>

#include "harness/ranks.h"
#include "local_sgd/simulation.h"

namespace tessera::testing::local {
namespace {

constexpr int kSteps = 8;

TEST(LocalSgd, ParametersAreThoseOfASimulationInOneProcess) {
  for (const int world : {2, 4}) {
    for (const int every : {1, 3}) {
      for (const auto& tested : cases(every)) {
        Simulation expected(world, tested.options, own_batches);
        expected.run(kSteps);
        std::vector<at::Tensor> before(world), after(world);
        run_ranks(world, [&](ProcessGroup group, int rank) {
          auto net = seeded<Uneven>(1);
          const auto optimizer = inner_optimizer(net);
          LocalSgd local(group, shards_of(*net), tested.options);
          for (int step = 0; step < kSteps; ++step) {
            train_on(net, *optimizer, own_rows(step, rank));
            local.step();
          }
          EXPECT_EQ(local.steps(), kSteps);
          EXPECT_EQ(local.synchronizations(), kSteps / every);
          before[rank] = flat(net->parameters());
          local.synchronize();
          after[rank] = flat(net->parameters());
        });
        const bool int8 = tested.options.wire == OuterWire::int8;
        for (int rank = 0; rank < world; ++rank) {
          const auto where =
              tested.name + ", every " + std::to_string(every) + ", rank " + std::to_string(rank);
          expect_near(before[rank], expected.parameters(rank), int8 ? 2e-2 : 2e-5, where);
          EXPECT_TRUE(at::equal(after[rank], after[0])) << where;
        }
        expected.synchronize();
        expect_near(after[0], expected.parameters(0), int8 ? 2e-2 : 2e-5,
                    tested.name + " at the end");
      }
    }
  }
}

TEST(LocalSgd, SynchronizingTwiceWithoutAStepMovesNothingAndSendsNothing) {
  for (const auto& tested : cases(2)) {
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      const auto optimizer = inner_optimizer(net);
      LocalSgd local(group, shards_of(*net), tested.options);
      const auto train = [&](int step) {
        train_on(net, *optimizer, own_rows(step, rank));
        local.step();
      };
      const auto expect_no_more = [&](int64_t synchronizations) {
        const auto synchronized = flat(net->parameters());
        group.reset_stats();
        local.synchronize();
        EXPECT_TRUE(at::equal(flat(net->parameters()), synchronized)) << tested.name;
        EXPECT_EQ(group.stats().payload_sent(), 0U) << tested.name;
        EXPECT_EQ(local.synchronizations(), synchronizations) << tested.name;
      };
      for (int step = 0; step < 4; ++step) train(step);
      local.synchronize();  // waits for what is under way
      expect_no_more(2);
      train(4);
      local.synchronize();  // between two steps that synchronise
      expect_no_more(3);
      train(5);
      EXPECT_EQ(local.synchronizations(), 4) << tested.name;
    });
  }
}

TEST(LocalSgd, TheAverageIsTheExactMeanOfTheParameters) {
  for (const int world : {2, 4}) {
    std::vector<at::Tensor> before(world), after(world);
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      LocalSgd local(group, shards_of(*net), {.sync_every = 1, .outer = OuterOptimizer::average});
      set_flat(net, random_batch({flat(net->parameters()).numel()}, rank));
      before[rank] = flat(net->parameters());
      local.step();
      after[rank] = flat(net->parameters());
    });
    const at::Tensor sum =
        world == 2 ? before[0] + before[1] : (before[0] + before[1]) + (before[2] + before[3]);
    for (const auto& values : after) EXPECT_TRUE(at::equal(values, sum * (1.0 / world)));
  }
}

TEST(LocalSgd, AllRanksBeginWithTheParametersOfRank0) {
  std::vector<at::Tensor> first(2);
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(static_cast<uint64_t>(rank + 1));
    LocalSgd local(group, shards_of(*net));
    first[rank] = flat(net->parameters());
  });
  EXPECT_TRUE(at::equal(first[0], flat(seeded<Uneven>(1)->parameters())));
  EXPECT_TRUE(at::equal(first[1], first[0]));
}

TEST(LocalSgd, OtherDtypesAndLayoutsAreKept) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Mixed>(1);
    auto half = torch::full({3}, 1.0, at::kBFloat16);
    auto shards = shards_of(*net);
    shards.push_back({{"half", {3}, 0, 3}, half});
    LocalSgd local(group, shards, {.sync_every = 1, .outer = OuterOptimizer::average});
    const auto before = copies(net->parameters());
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.add_(rank == 0 ? 1 : -0.5);
      half.add_(rank);
    }
    local.step();
    for (size_t i = 0; i < before.size(); ++i) {
      const auto now = net->parameters()[i];
      EXPECT_TRUE(at::allclose(now, before[i] + 0.25));
      EXPECT_EQ(now.strides(), before[i].strides());
    }
    EXPECT_TRUE(at::equal(half, at::full({3}, 1.5, at::kBFloat16)));
  });
}

// A complex parameter trains as one of pairs, whose ends may be on different ranks of a group.
TEST(LocalSgd, ComplexParametersAreThoseOfPairs) {
  const auto number = [](double value) { return at::full({}, value, at::kComplexFloat); };
  for (const auto outer : {OuterOptimizer::average, OuterOptimizer::nesterov}) {
    run_ranks(4, [&](ProcessGroup group, int rank) {
      auto groups = local_sgd_groups(group, 2);
      const auto numbers = at::arange(6, at::kFloat).view({3, 2});
      auto spectrum = at::complex(numbers, 2 * numbers).t();
      auto last = number(1);
      auto pairs = at::view_as_real(spectrum).clone(at::MemoryFormat::Contiguous);
      auto last_pair = at::view_as_real(last).clone();
      const auto shards = [](const at::Tensor& a, const at::Tensor& b) {
        return parameter_shards({{"spectrum", a}, {"last", b}});
      };
      const LocalSgdOptions options{.sync_every = 1, .outer = outer};
      LocalSgd ours(groups.outer, shards(spectrum, last), options, groups.inner);
      LocalSgd real(groups.outer, shards(pairs, last_pair), options, groups.inner);
      for (int step = 0; step < 3; ++step) {
        const auto change = (rank / 2 + step) * c10::complex<float>(0.5, -1);
        spectrum.add_(at::full({}, change, at::kComplexFloat));
        last.mul_(2);
        at::view_as_complex(pairs).add_(at::full({}, change, at::kComplexFloat));
        last_pair.mul_(2);
        ours.step();
        real.step();
      }
      EXPECT_TRUE(at::equal(at::view_as_real(spectrum), pairs));
      EXPECT_TRUE(at::equal(at::view_as_real(last), last_pair));
      EXPECT_TRUE(at::equal(ours.state_dict().at("anchor"), real.state_dict().at("anchor")));
      const auto expected = real.state_ranges();
      const auto ranges = ours.state_ranges();
      ASSERT_EQ(ranges.size(), expected.size());
      for (size_t i = 0; i < ranges.size(); ++i) {
        EXPECT_EQ(ranges[i].shape, expected[i].shape);
        EXPECT_EQ(ranges[i].begin, expected[i].begin);
        EXPECT_EQ(ranges[i].numel, expected[i].numel);
        EXPECT_EQ(ranges[i].strides, expected[i].strides);
      }
    });
  }
}

TEST(LocalSgd, WhatInt8RoundsAwayIsSentLater) {
  constexpr int kMany = 40;
  run_ranks(2, [](ProcessGroup group, int) {
    auto values = torch::zeros({2});
    LocalSgd local(group, {{{"values", {2}, 0, 2}, values}},
                   {.sync_every = 1, .outer = OuterOptimizer::average, .wire = OuterWire::int8});
    for (int step = 0; step < kMany; ++step) {
      values.add_(torch::tensor({100.0F, 0.1F}));  // a scale of 100 / 127 rounds 0.1 to 0
      local.step();
    }
    EXPECT_NEAR(values[0].item<float>(), kMany * 100, 1);
    EXPECT_NEAR(values[1].item<float>(), kMany * 0.1, 0.5);
  });
}

TEST(LocalSgd, CollectivesAndBytesAreThoseOfTheDocumentation) {
  run_ranks(2, [](ProcessGroup group, int) {
    auto net = seeded<Uneven>(1);
    const auto numel = static_cast<uint64_t>(flat(net->parameters()).numel());
    for (const auto wire : {OuterWire::float32, OuterWire::int8}) {
      LocalSgd local(group, shards_of(*net), {.sync_every = 5, .wire = wire});
      group.reset_stats();
      for (int step = 0; step < 4; ++step) local.step();
      EXPECT_EQ(group.stats().calls(), 0u);
      for (int step = 4; step < 10; ++step) local.step();
      const auto stats = group.stats();
      EXPECT_EQ(stats.calls(), 2u);
      if (wire == OuterWire::float32) {
        EXPECT_EQ(stats.all_reduce.calls, 2u);
        EXPECT_EQ(stats.all_reduce.bytes_sent, 2 * 4 * numel);
      } else {
        EXPECT_EQ(stats.all_gather.calls, 2u);
        EXPECT_EQ(stats.all_gather.bytes_sent, 2 * (256u + 4u));  // one block
      }
    }
  });
}

}  // namespace
}  // namespace tessera::testing::local
