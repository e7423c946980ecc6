// Runs the snippets of docs/join.md and docs/distributed_optimizer.md.
// tests/integration/readme_test.py checks that the snippets are equal.

#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "tessera/tessera.h"

namespace documented {
namespace {

using tessera::testing::loss_of;
using tessera::testing::Uneven;

std::vector<at::Tensor> batches_of(int rank) {
  return {static_cast<size_t>(3 + 2 * rank), torch::ones({4, 3})};
}

TEST(Documented, Join) {
  tessera::testing::run_ranks(2, [](tessera::ProcessGroup world, int rank) {
    Uneven net;
    const auto batches = batches_of(rank);
    // [documented]
    tessera::DistributedDataParallel ddp(net, world);
    tessera::ZeroRedundancyOptimizer zero(
        *net, world, tessera::default_optimizers().factory("AdamW", {{"lr", 1e-3}}),
        {.reduce_gradients = false});
    tessera::join({ddp, zero}, {}, [&](tessera::JoinLoop& loop) {
      for (const auto& x : batches) {
        loop.next();  // counts the ranks that still have data
        loss_of(ddp(x)).backward();
        zero.step();
        zero.zero_grad();
      }
    });
    // [end]
  });
}

TEST(Documented, JoinOverShards) {
  tessera::testing::run_ranks(2, [](tessera::ProcessGroup world, int rank) {
    Uneven net;
    const auto batches = batches_of(rank);
    tessera::FullyShardedDataParallel fsdp(net, world);
    torch::optim::AdamW optimizer(fsdp.parameters(), 1e-3);
    // [documented]
    fsdp.set_shadow_step([&] {  // an iteration without data
      optimizer.zero_grad();
      fsdp.shadow_backward();
      fsdp.clip_grad_norm_(1.0);
      optimizer.step();
    });
    tessera::join({fsdp}, {}, [&](tessera::JoinLoop& loop) {
      for (const auto& x : batches) {
        loop.next();
        optimizer.zero_grad();
        loss_of(fsdp(x)).backward();
        fsdp.clip_grad_norm_(1.0);
        optimizer.step();
      }
    });
    // [end]
  });
}

TEST(Documented, OwnJoinable) {
  tessera::testing::run_ranks(2, [](tessera::ProcessGroup world, int rank) {
    // [documented]
    struct Average : tessera::Joinable {
      explicit Average(tessera::ProcessGroup g) : group(g) {}
      tessera::ProcessGroup join_group() const override { return group; }
      void on_join_iteration(const tessera::JoinIteration& iteration) override {
        active = iteration.active_ranks;
      }
      void shadow_step() override { of(0); }
      double of(double value) {
        auto sum = at::full({1}, value);
        group.all_reduce(sum, 1.0 / active);
        return sum.item<double>();
      }
      tessera::ProcessGroup group;
      int active = 1;
    };
    // [end]
    Average average(world);
    tessera::join({average}, {}, [&](tessera::JoinLoop& loop) {
      for (int step = 0; step <= rank; ++step) {
        loop.next();
        EXPECT_EQ(average.of(rank + 1), step == 0 ? 1.5 : 2);
      }
    });
  });
}

TEST(Documented, DistributedOptimizer) {
  tessera::testing::run_ranks(2, [](tessera::ProcessGroup world, int rank) {
    Uneven net;
    const auto batches = batches_of(0);
    const auto steps = static_cast<int64_t>(batches.size());
    // [documented]
    tessera::DistributedOptimizer optimizer(
        *net, world, tessera::default_optimizers().factory("SGD", {{"lr", 0.1}, {"momentum", 0.9}}),
        {.reduce_method = "mean", .bcast_period = 500, .param_pack = true});
    const auto schedule = tessera::step_lr({.step_size = 30});
    for (int64_t step = 0; step < steps; ++step) {
      for (auto& group : optimizer.optimizer().param_groups())
        group.options().set_lr(schedule({.step = step}, 0.1));
      optimizer.zero_grad();
      optimizer.backward(loss_of(net(batches[step])));  // each .grad is now the mean over the ranks
      torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
      optimizer.step();
    }
    // [end]
  });
}

TEST(Documented, CompressionHook) {
  tessera::testing::run_ranks(2, [](tessera::ProcessGroup world, int rank) {
    Uneven net;
    // [documented]
    tessera::PowerSgd power({.rank = 4, .start_iteration = 1000});
    tessera::DistributedDataParallel ddp(net, world, {.comm_hook = power.hook()});
    const auto state = power.state_dict();  // each rank saves its own
    // [end]
    EXPECT_EQ(state.size(), 1u);
    loss_of(ddp(torch::ones({4, 3}))).backward();
  });
}

}  // namespace
}  // namespace documented
