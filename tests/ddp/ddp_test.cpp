#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/error.h"
#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;

using DdpOptions = DistributedDataParallelOptions;

struct Case {
  std::string name;
  DdpOptions options;
};

std::vector<Case> cases() {
  DdpOptions small, unused, fixed;
  small.first_bucket_mb = 20.0 / (1 << 20);
  small.bucket_cap_mb = 60.0 / (1 << 20);
  unused = small;
  unused.find_unused_parameters = true;
  fixed = small;
  fixed.static_graph = true;
  return {{"one_bucket", {}},
          {"many_buckets", small},
          {"find_unused", unused},
          {"static_graph", fixed}};
}

class Ddp : public ::testing::TestWithParam<Case> {};

TEST_P(Ddp, EqualsOneProcessOnTheConcatenatedBatch) {
  auto plain = seeded<Uneven>(1);
  auto reference = adamw(plain->parameters());
  for (int step = 0; step < 5; ++step) {
    clear_gradients(plain->parameters());
    loss_of(plain(rows(step))).backward();
    reference->step();
  }
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1 + rank);  // construction broadcasts rank 0's weights
      DistributedDataParallel ddp(net, group, GetParam().options);
      auto optimizer = adamw(net->parameters());
      for (int step = 0; step < 5; ++step) {
        clear_gradients(net->parameters());
        loss_of(ddp(rows(step, rank, world))).backward();
        optimizer->step();
      }
      for (const auto& item : plain->named_parameters()) {
        const auto mine = net->named_parameters()[item.key()];
        ASSERT_TRUE(at::allclose(mine, item.value(), 1e-5, 1e-6))
            << item.key() << " world " << world;
        if (world == 1) ASSERT_TRUE(at::equal(mine, item.value())) << item.key();
      }
    });
  }
}

TEST_P(Ddp, EqualsZeroBitByBit) {
  for (int world = 2; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1), other = seeded<Uneven>(1);
      DistributedDataParallel ddp(net, group, GetParam().options);
      auto optimizer = adamw(net->parameters());
      ZeroRedundancyOptimizer zero(*other, group,
                                   default_optimizers().factory("AdamW", {{"lr", 0.02}}));
      for (int step = 0; step < 4; ++step) {
        clear_gradients(net->parameters());
        loss_of(ddp(rows(step, rank, world))).backward();
        optimizer->step();
        zero.zero_grad();
        loss_of(other(rows(step, rank, world))).backward();
        zero.step();
      }
      for (size_t i = 0; i < net->parameters().size(); ++i)
        ASSERT_TRUE(at::equal(net->parameters()[i], other->parameters()[i])) << "world " << world;
    });
  }
}

TEST_P(Ddp, NoSyncAccumulatesWithoutTraffic) {
  auto plain = seeded<Uneven>(2);
  (loss_of(plain(rows(0))) + loss_of(plain(rows(1)))).backward();
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(2);
    DistributedDataParallel ddp(net, group, GetParam().options);
    loss_of(ddp(rows(0))).backward();  // determines the static graph
    clear_gradients(net->parameters());
    ddp(rows(0));  // buckets are rebuilt before this forward
    {
      auto scope = ddp.no_sync();
      const auto before = group.stats().calls();
      loss_of(ddp(rows(0, rank, 2))).backward();
      EXPECT_EQ(group.stats().calls(), before);
    }
    loss_of(ddp(rows(1, rank, 2))).backward();
    for (size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(
          at::allclose(net->parameters()[i].grad(), plain->parameters()[i].grad(), 1e-5, 1e-7));
  });
}

INSTANTIATE_TEST_SUITE_P(All, Ddp, ::testing::ValuesIn(cases()),
                         [](const auto& tested) { return tested.param.name; });

TEST(DdpBehaviour, TrafficIsOneAllReduceOfTheGradients) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(2);
    auto options = cases()[1].options;
    DistributedDataParallel ddp(net, group, options);
    uint64_t numel = 0;
    for (const auto& p : net->parameters()) numel += p.numel();
    for (int step = 0; step < 3; ++step) {
      clear_gradients(net->parameters());
      if (step == 1) ddp(rows(0));  // buckets are rebuilt before this forward
      group.reset_stats();
      loss_of(ddp(rows(step, rank, 2))).backward();
      EXPECT_EQ(group.stats().all_reduce.bytes_sent, numel * 4);
      EXPECT_EQ(group.stats().all_reduce.calls, ddp.buckets());
      EXPECT_GT(ddp.buckets(), 2u);
    }
  });
}

TEST(DdpBehaviour, BuffersComeFromRankZero) {
  run_ranks(3, [&](ProcessGroup group, int rank) {
    auto net = std::make_shared<WithBuffer>();
    net->mean.fill_(rank + 1);
    DistributedDataParallel ddp(net, group);
    EXPECT_EQ(net->mean[0].item<float>(), 1);
    net->mean.fill_(10 * rank + 5);
    ddp(torch::ones({2}));
    EXPECT_EQ(net->mean[0].item<float>(), 5);
  });
}

TEST(DdpBehaviour, BuffersAreNotBroadcastIfNoGradientIsReduced) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    torch::nn::BatchNorm1d net(3);
    DistributedDataParallel ddp(net, group);
    net->running_mean.fill_(rank);
    group.reset_stats();
    {
      torch::NoGradGuard no_grad;
      ddp(rows(0));
    }
    {
      auto scope = ddp.no_sync();
      ddp(rows(0));
    }
    net->eval();
    ddp(rows(0));
    EXPECT_EQ(group.stats().calls(), 0u);
    EXPECT_NE(net->running_mean[0].item<float>(), 1 - rank);
  });
}

TEST(DdpBehaviour, GradientsThatArriveInAnotherOrderOnEachRankAreReducedWithTheirOwnKind) {
  struct TwoBranches : torch::nn::Module {
    TwoBranches() {
      a = register_module("a", torch::nn::Linear(torch::nn::LinearOptions(3, 3).bias(false)));
      b = register_module("b", torch::nn::Linear(torch::nn::LinearOptions(3, 3).bias(false)));
    }
    /// Backward visits the nodes in the reverse order of their creation.
    torch::Tensor forward(torch::Tensor x, bool a_first) {
      const auto first = loss_of((a_first ? a : b)(x));
      const auto second = loss_of(2 * (a_first ? b : a)(x));
      return first + second;
    }
    torch::nn::Linear a{nullptr}, b{nullptr};
  };
  run_ranks(3, [&](ProcessGroup group, int rank) {
    auto net = std::make_shared<TwoBranches>(), alone = std::make_shared<TwoBranches>();
    DistributedDataParallel ddp(net, group, {.first_bucket_mb = 1e-6, .bucket_cap_mb = 1e-6});
    for (const char* name : {"a.weight", "b.weight"})
      alone->named_parameters()[name].set_data(net->named_parameters()[name].detach().clone());
    for (int step = 0; step < 3; ++step) {
      clear_gradients(net->parameters());
      clear_gradients(alone->parameters());
      EXPECT_EQ(ddp.buckets(), 2u);
      ddp(rows(step), rank == 1).backward();
      for (int r = 0; r < 3; ++r) (alone->forward(rows(step), r == 1) / 3).backward();
      for (size_t i = 0; i < 2; ++i)
        EXPECT_TRUE(
            at::allclose(net->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-5, 1e-7))
            << "step " << step;
    }
  });
}

TEST(DdpBehaviour, GradientsOfANoSyncPassAreReducedEvenIfTheLastPassDoesNotUseTheirParameters) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(2), plain = seeded<Uneven>(2);
    auto options = cases()[1].options;
    DistributedDataParallel ddp(net, group, options);
    {
      auto scope = ddp.no_sync();
      loss_of(ddp(rows(0, rank, 2))).backward();
    }
    loss_of(torch::tanh(net->second(rows(1, rank, 2)))).backward();
    (loss_of(plain(rows(0))) + loss_of(torch::tanh(plain->second(rows(1))))).backward();
    for (size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(
          at::allclose(net->parameters()[i].grad(), plain->parameters()[i].grad(), 1e-5, 1e-7))
          << i;
  });
}

TEST(DdpBehaviour, AMissingGradientIsAnErrorOnAllRanksThatNamesItAndTheRank) {
  const auto errors = run_ranks_catching(3, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(2);
    DistributedDataParallel ddp(net, group, cases()[1].options);
    auto y = ddp(rows(0));
    (rank == 1 ? loss_of(torch::tanh(net->second(rows(0)))) : loss_of(y)).backward();
  });
  for (const auto& error : errors) {
    EXPECT_THAT(message_of(error), HasSubstr("DistributedDataParallel: rank 1"));
    EXPECT_THAT(message_of(error), HasSubstr("last.weight"));
    EXPECT_THAT(message_of(error), HasSubstr("find_unused_parameters"));
  }
}

TEST(DdpBehaviour, ParametersThatNoRankUsesGetNoGradient) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(2);
    DistributedDataParallel ddp(net, group, cases()[2].options);
    ddp(rows(0));
    loss_of(torch::tanh(net->second(rows(0)))).backward();
    EXPECT_FALSE(net->last->weight.grad().defined());
    ASSERT_TRUE(net->second->weight.grad().defined());
    clear_gradients(net->parameters());
    auto y = ddp(rows(0));
    (rank == 0 ? loss_of(y) : loss_of(torch::tanh(net->second(rows(0))))).backward();
    auto alone = seeded<Uneven>(2);
    loss_of(alone(rows(0))).backward();
    EXPECT_TRUE(at::allclose(net->last->weight.grad(), alone->last->weight.grad() / 2));
    clear_gradients(net->parameters());
    loss_of(ddp(rows(1))).backward();
    clear_gradients(net->parameters());
    auto again = ddp(rows(0));
    (rank == 0 ? loss_of(again) : loss_of(torch::tanh(net->second(rows(0))))).backward();
    EXPECT_TRUE(at::allclose(net->last->weight.grad(), alone->last->weight.grad() / 2))
        << "rank 1 contributes zero, not its previous gradient";
  });
}

TEST(DdpBehaviour, TheFirstDifferenceBetweenModelsIsNamedAtConstruction) {
  const auto errors = run_ranks_catching(3, [&](ProcessGroup group, int rank) {
    DistributedDataParallel ddp(torch::nn::Linear(3, rank == 2 ? 5 : 4), group);
  });
  for (const auto& error : errors)
    EXPECT_THAT(message_of(error), HasSubstr("entry 0 is 'weight Float ["));
}

TEST(DdpBehaviour, RefusesOptionsOutOfRangeAndFrozenModels) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    EXPECT_THROW(DistributedDataParallel(torch::nn::Linear(2, 2), group, {.bucket_cap_mb = 0}),
                 UsageError);
    torch::nn::Linear frozen(2, 2);
    for (auto& p : frozen->parameters()) p.requires_grad_(false);
    EXPECT_THROW(DistributedDataParallel(frozen, group), UsageError);
  });
}

TEST(DdpBehaviour, CompressionHooksHalveTheBytesAndApproximateTheMean) {
  for (const bool bf16 : {false, true}) {
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(2), exact = seeded<Uneven>(2);
      DistributedDataParallel ddp(
          net, group, {.comm_hook = bf16 ? bf16_compress_hook() : fp16_compress_hook()});
      group.reset_stats();
      loss_of(ddp(rows(0, rank, 2))).backward();
      uint64_t numel = 0;
      for (const auto& p : net->parameters()) numel += p.numel();
      EXPECT_EQ(group.stats().all_reduce.bytes_sent, numel * 2);
      loss_of(exact(rows(0))).backward();
      for (size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TRUE(at::allclose(net->parameters()[i].grad(), exact->parameters()[i].grad(),
                                 bf16 ? 2e-2 : 2e-3, 1e-3));
    });
  }
}

TEST(DdpBehaviour, ABackwardThatThrowsDoesNotAffectTheNextOne) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    struct Fails : torch::autograd::Function<Fails> {
      static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) {
        return x.clone();
      }
      static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                     torch::autograd::variable_list) {
        throw std::runtime_error("inside backward");
      }
    };
    auto net = seeded<Uneven>(2), plain = seeded<Uneven>(2);
    DistributedDataParallel ddp(net, group, cases()[1].options);
    auto hidden = Fails::apply(torch::tanh(net->first(rows(1))));
    // The collectives that rank 0 started are still running when its next backward begins.
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_THROW(loss_of(net->last(torch::tanh(net->second(hidden)))).backward(),
                 std::runtime_error);
    clear_gradients(net->parameters());
    loss_of(ddp(rows(0))).backward();
    loss_of(plain(rows(0))).backward();
    for (size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(at::equal(net->parameters()[i].grad(), plain->parameters()[i].grad()));
  });
}

}  // namespace
