#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "placements/wrappers.h"

// Parameters of 16 bits with float32 master weights: with each wrapper the bits of a plain loop
// that trains in float32 and rounds the weights after each step.

namespace {

using namespace tessera;
using namespace tessera::testing;

/// The mean over ranks as collectives take it: summed as a tree in float32, rounded once.
at::Tensor mean_of(const Tensors& own) {
  Tensors sums;
  for (const auto& each : own) sums.push_back(each.to(at::kFloat));
  while (sums.size() > 1) {
    Tensors pairs;
    for (size_t i = 0; i < sums.size(); i += 2)
      pairs.push_back(i + 1 < sums.size() ? sums[i] + sums[i + 1] : sums[i]);
    sums = pairs;
  }
  return sums[0].mul(1.0F / static_cast<float>(own.size())).to(own[0].scalar_type());
}

struct Plain {
  Tensors weights;  ///< Rounded.
  Tensors masters;
};

/// No wrapper, and no with_master_weights(): an optimizer over float32 weights.
Plain train_plainly(int world, const Training& training) {
  auto net = fresh(training);
  Tensors masters;
  for (const auto& each : net->parameters()) masters.push_back(each.detach().to(at::kFloat));
  const auto optimizer = adamw(masters);
  for (int step = 0; step < training.steps; ++step) {
    std::vector<Tensors> own(masters.size());
    for (int rank = 0; rank < world; ++rank) {
      clear_gradients(net->parameters());
      loss_of(net(own_rows(step, rank).to(training.dtype))).backward();
      for (size_t i = 0; i < own.size(); ++i) own[i].push_back(net->parameters()[i].grad().clone());
    }
    for (size_t i = 0; i < own.size(); ++i)
      masters[i].mutable_grad() = mean_of(own[i]).to(at::kFloat);
    optimizer->step();
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < own.size(); ++i) net->parameters()[i].copy_(masters[i]);
  }
  return {copies(net->parameters()), masters};
}

TEST(MasterWeights, EveryWrapperHasTheBitsOfAPlainLoop) {
  const Training training{.dtype = at::kBFloat16, .steps = 6, .master_weights = true};
  for (const auto& hosts :
       std::vector<std::vector<int>>{{0}, {0, 0}, {0, 1}, {0, 0, 0}, {0, 0, 1, 1}}) {
    const int world = static_cast<int>(hosts.size());
    const auto plain = train_plainly(world, training).weights;
    for (const auto& [name, train, gathers, shares] : all_trainings(world)) {
      const auto where = name + " " + ::testing::PrintToString(hosts);
      run_ranks_on(hosts, [&, train = train](ProcessGroup group, int rank) {
        const auto weights = train(group, rank, training);
        // Hybrid sharding rounds a mean twice, which AdamW turns into more.
        const double tolerance = where.find("hybrid") == std::string::npos ? 0 : 0.1;
        for (size_t i = 0; i < plain.size(); ++i)
          EXPECT_TRUE(at::allclose(weights[i].to(at::kFloat), plain[i].to(at::kFloat), tolerance,
                                   tolerance))
              << where << ", parameter " << i;
      });
    }
  }
}

/// Every rank has the same rows, so that all world sizes have the same gradients.
OptimizerStateDict train_zero_on_the_same_rows(int world, Partition partition, int first, int steps,
                                               Tensors& weights, const OptimizerStateDict& start) {
  OptimizerStateDict result;
  run_ranks(world, [&, initial = weights](ProcessGroup group, int rank) {
    const Training training{.dtype = at::kBFloat16, .master_weights = true};
    auto net = fresh(training);
    ZeroRedundancyOptimizer zero(*net, group, training.factory(), {.partition = partition});
    if (!start.state.empty()) {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < initial.size(); ++i) net->parameters()[i].copy_(initial[i]);
      zero.load_state_dict(start);
    }
    for (int step = first; step < first + steps; ++step) {
      zero.zero_grad();
      loss_of(net(own_rows(step, 0).to(training.dtype))).backward();
      zero.step();
    }
    zero.consolidate_state_dict(0);
    if (rank == 0) {
      result = zero.state_dict();
      weights = copies(net->parameters());
    }
  });
  return result;
}

TEST(MasterWeights, GoOnWithOtherNumbersOfRanks) {
  const auto plain = train_plainly(1, {.dtype = at::kBFloat16, .steps = 6});
  for (const auto partition : {Partition::flat, Partition::whole}) {
    for (const auto& worlds : std::vector<std::vector<int>>{{1, 2, 3}, {4, 1, 2}, {3, 4, 1}}) {
      Tensors weights;
      OptimizerStateDict state;
      for (size_t part = 0; part < worlds.size(); ++part)
        state = train_zero_on_the_same_rows(worlds[part], partition, 2 * static_cast<int>(part), 2,
                                            weights, state);
      const auto names = named_parameters(*seeded<Uneven>(8));
      for (size_t i = 0; i < names.size(); ++i) {
        EXPECT_TRUE(at::equal(weights[i], plain.weights[i])) << names[i].first;
        EXPECT_TRUE(
            at::equal(state.state.at(names[i].first).tensors.at("master"), plain.masters[i]))
            << names[i].first;
      }
    }
  }
}

TEST(MasterWeights, OfZeroTakeTheMemoryOfOneRanksShards) {
  run_ranks(4, [&](ProcessGroup group, int rank) {
    const Training training{.dtype = at::kBFloat16, .master_weights = true};
    auto net = fresh(training);
    ZeroRedundancyOptimizer zero(*net, group, training.factory());
    loss_of(net(own_rows(0, rank).to(training.dtype))).backward();
    zero.step();
    int64_t elements = 0;
    for (const auto& shard : zero.shards()) elements += shard.numel;
    EXPECT_EQ(zero.memory().optimizer_state, 12 * elements);  // two moments and the master weight
  });
}

TEST(MasterWeights, OfOneRankAloneAreAnError) {
  const auto errors = run_ranks_catching(2, [](ProcessGroup group, int rank) {
    const Training training{.dtype = at::kBFloat16, .master_weights = rank == 1};
    auto net = fresh(training);
    DistributedOptimizer optimizer(*net, group, training.factory(), {.reduce_method = "mean"});
  });
  for (const auto& error : errors)
    EXPECT_THAT(message_of(error), ::testing::AllOf(::testing::HasSubstr("optimizer"),
                                                    ::testing::HasSubstr("with_master_weights(")));
}

// The snippet of docs/memory.md; tests/integration/readme_test.py checks that they are equal.
TEST(MasterWeights, AreMadeAsThePageSays) {
  run_ranks(2, [](ProcessGroup world, int rank) {
    Uneven net;
    // [documented]
    net->to(torch::kBFloat16);
    const auto adamw = tessera::default_optimizers().factory("AdamW", {{"lr", 1e-3}});
    tessera::ZeroRedundancyOptimizer optimizer(*net, world, tessera::with_master_weights(adamw));
    // [end]
    loss_of(net(own_rows(0, rank).to(torch::kBFloat16))).backward();
    optimizer.step();
    EXPECT_EQ(optimizer.shards()[0].tensor.scalar_type(), at::kBFloat16);
  });
}

}  // namespace
