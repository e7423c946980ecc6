#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "fsdp/chain.h"
#include "harness/batches.h"
#include "harness/buffers.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"

// Lines of user code that did something else under FSDP than with the plain module.

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

TEST(FsdpGraph, KeptOverAStepRaises) {
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op,
                              ShardingStrategy::no_shard}) {
    for (const char* name : {"SGD", "torch.Adam"}) {
      const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(1);
        FullyShardedDataParallel fsdp(net, group, {.sharding_strategy = strategy});
        const auto optimizer = default_optimizers().factory(
            name, {{"lr", 0.1}})({torch::optim::OptimizerParamGroup(fsdp.parameters())});
        auto kept = loss_of(fsdp(rows(1, rank, 2)));
        loss_of(fsdp(rows(0, rank, 2))).backward();
        optimizer->step();
        kept.backward();
      });
      for (const auto& error : errors)
        EXPECT_THAT(message_of(error), HasSubstr("modified")) << static_cast<int>(strategy) << name;
    }
  }
}

TEST(FsdpGraph, OfAnEarlierForwardRaisesAfterALaterForward) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    FullyShardedDataParallel fsdp(net, group);
    torch::optim::Adam adam(fsdp.parameters(), 0.1);
    auto kept = loss_of(fsdp(rows(1, rank, 2)));
    loss_of(fsdp(rows(0, rank, 2))).backward();
    adam.step();
    {
      torch::NoGradGuard no_grad;
      fsdp(rows(2, rank, 2));
    }
    kept.backward();
  });
  for (const auto& error : errors)
    EXPECT_THAT(message_of(error), HasSubstr("modified by an inplace operation"));
}

TEST(FsdpGraph, KeptWithoutAStepMayBeUsed) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    FullyShardedDataParallel fsdp(net, group);
    torch::optim::SGD sgd(fsdp.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      auto kept = loss_of(fsdp(rows(1, rank, 2)));
      loss_of(fsdp(rows(0, rank, 2))).backward();
      kept.backward();
      sgd.step();
      sgd.zero_grad();
    }
  });
}

TEST(FsdpOptimizer, OverTheModulesOwnParametersIsRefusedByCheckOptimizer) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    FullyShardedDataParallel fsdp(net, group);
    torch::optim::AdamW wrong(net->parameters());
    EXPECT_THAT(thrown_by([&] { fsdp.check_optimizer(wrong); }),
                HasSubstr("Optimizer(fsdp.parameters(), …)"));
    torch::optim::AdamW right(fsdp.parameters());
    fsdp.check_optimizer(right);
  });
}

TEST(FsdpWrappedTwice, IsAnErrorThatNamesFsdp) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    FullyShardedDataParallel fsdp(net, group);
    const std::string already = "already sharded by FullyShardedDataParallel";
    EXPECT_THAT(thrown_by([&] { FullyShardedDataParallel again(net, group); }), HasSubstr(already));
    EXPECT_THAT(thrown_by([&] { DistributedDataParallel ddp(net, group); }), HasSubstr(already));
    EXPECT_THAT(thrown_by([&] {
                  ZeroRedundancyOptimizer zero(*net, group,
                                               default_optimizers().factory("SGD", {}));
                }),
                HasSubstr(already));
  });
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group);
    EXPECT_THAT(thrown_by([&] { FullyShardedDataParallel fsdp(net, group); }),
                HasSubstr("already wrapped by DistributedDataParallel"));
  });
}

TEST(FsdpBuffers, AreEqualAfterEveryBackward) {
  for (const auto rule : {BufferSync::broadcast, BufferSync::mean}) {
    for (const int world : {2, 3}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        torch::nn::Sequential net(torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 2));
        FullyShardedDataParallel fsdp(net, group, {.buffers = rule});
        torch::optim::SGD sgd(fsdp.parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          sgd.zero_grad();
          loss_of(fsdp.call([&](auto& module) {
            return module->forward(rows(step, rank, world));
          })).backward();
          sgd.step();
          expect_equal_buffers(*net, group);
        }
      });
    }
  }
}

TEST(FsdpApi, ForwardArrowTrainAndEvalAreThoseOfTheModule) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    FullyShardedDataParallel fsdp(net, group);
    EXPECT_TRUE(at::equal(fsdp.forward(rows(0)), fsdp(rows(0))));
    fsdp.eval();
    EXPECT_FALSE(fsdp->is_training());
    fsdp.train();
    EXPECT_TRUE(net->is_training());
  });
}

TEST(FsdpForward, ThatThrowsLeavesTheAutocastCacheAsItWas) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    FullyShardedDataParallel fsdp(net, group);
    at::autocast::set_autocast_cache_enabled(true);
    EXPECT_ANY_THROW(fsdp(at::ones({2, 17})));
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    fsdp(rows(0));  // still works
    group.barrier();
  });
}

TEST(FsdpForward, ThatCannotBeginOrEndLeavesTheAutocastCacheAsItWas) {
  // Rank 1 calls a barrier where rank 0 begins its second forward, or ends its first.
  for (const bool at_end : {false, true}) {
    const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      FullyShardedDataParallel fsdp(net, group,
                                    {.sharding_strategy = ShardingStrategy::shard_grad_op});
      at::autocast::set_autocast_cache_enabled(true);
      if (!at_end) fsdp(rows(0));
      if (rank == 1 && at_end)
        fsdp.call([&](auto& module) {
          module->forward(rows(0));
          group.barrier();
        });
      if (rank == 1) group.barrier();
      const auto restored = c10::make_scope_exit([] {
        EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
        at::autocast::set_autocast_cache_enabled(true);
      });
      fsdp(rows(0));
    });
    expect_usage_errors(errors, "the ranks disagree about a collective");
  }
}

}  // namespace
}  // namespace tessera::testing
