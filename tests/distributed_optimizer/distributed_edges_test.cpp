#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>

#include "harness/batches.h"
#include "harness/buffers.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/optim.h"

// Lines of user code that did something else than they say.

namespace tessera {
namespace {

using testing::expect_equal_buffers;
using testing::expect_usage_errors;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::message_of;
using testing::rows;
using testing::run_ranks;
using testing::run_ranks_catching;
using testing::seeded;
using testing::thrown_by;
using testing::Uneven;

OptimizerFactory sgd() { return default_optimizers().factory("SGD", {{"lr", 0.1}}); }

TEST(DistributedSum, ASecondBackwardOntoReducedGradientsIsAnErrorOnAllRanks) {
  for (const auto& [pack, clips] : {std::pair(false, false), {true, false}, {false, true}}) {
    const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      DistributedOptimizer optimizer(*net, group, sgd(),
                                     {.reduce_method = "sum", .param_pack = pack});
      optimizer.backward(loss_of(net(rows(0, rank, 2))));
      if (clips) torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-3);
      optimizer.backward(loss_of(net(rows(1, rank, 2))));
    });
    expect_usage_errors(errors, "expected zero_grad() before it");
  }
}

TEST(DistributedSum, ClearedOrLocalGradientsMayBeAddedTo) {
  for (const bool pack : {false, true}) {
    for (const bool to_none : {false, true}) {
      run_ranks(2, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(1);
        DistributedOptimizer optimizer(*net, group, sgd(),
                                       {.reduce_method = "sum", .param_pack = pack});
        for (int step = 0; step < 4; ++step) {
          optimizer.zero_grad(to_none);
          {
            auto no_sync = optimizer.no_sync();
            optimizer.backward(loss_of(net(rows(step, rank, 2))));
          }
          optimizer.backward(loss_of(net(rows(step + 1, rank, 2) * (step == 2 ? NAN : 1))));
          optimizer.step();
        }
      });
    }
  }
}

TEST(DistributedGroup, WithoutADistGroupNeedsAWorld) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    EXPECT_THAT(thrown_by([&] {
                  DistributedOptimizer({{named_parameters(*net)}}, sgd(),
                                       {.reduce_method = "mean"});
                }),
                HasSubstr("group 0 has no dist_group"));
    // Not synchronised, and said so.
    DistributedOptimizer alone({{named_parameters(*net), {}, ProcessGroup()}}, sgd(), {});
    alone.backward(loss_of(net(rows(0, rank, 2))));
    alone.step();
  });
}

TEST(DistributedGroup, WithoutADistGroupTakesTheWorldOfTheProcess) {
  auto net = seeded<Uneven>(1);
  {
    const auto world = init_process_group();  // no launcher: one rank
    ASSERT_TRUE(default_process_group());
    DistributedOptimizer optimizer({{named_parameters(*net)}}, sgd(), {});
    EXPECT_EQ(optimizer.join_group().impl(), world.impl());
  }
  EXPECT_FALSE(default_process_group()) << "no copy of the world exists";
}

TEST(DistributedParameters, ConvertedAfterConstructionAreAnErrorOnAllRanks) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedOptimizer optimizer(*net, group, sgd(), {.reduce_method = "mean"});
    net->to(torch::kDouble);
    loss_of(net(rows(0, rank, 2).to(torch::kDouble))).backward();
    optimizer.step();
  });
  expect_usage_errors(errors, "is no longer collected");
}

TEST(DistributedGroups, AGroupThatWasAddedLaterIsAnError) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedOptimizer optimizer(*net, group, sgd(), {.reduce_method = "mean"});
    optimizer.optimizer().add_param_group(
        torch::optim::OptimizerParamGroup({at::ones({2}).requires_grad_()}));
    optimizer.backward(loss_of(net(rows(0, rank, 2))));
    optimizer.step();
  });
  expect_usage_errors(errors, "the optimizer has 2 parameter groups, of which 1 are known");
}

TEST(DistributedOptions, ThatDifferBetweenRanksAreAnErrorOnAllRanks) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedOptimizer optimizer(
        *net, group, default_optimizers().factory("SGD", {{"lr", rank == 0 ? 0.1 : 0.2}}),
        {.reduce_method = "mean"});
  });
  expect_usage_errors(errors, "lr 0.2");
}

TEST(DistributedBesideDdp, IsAnErrorThatNamesTheOther) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group);
    DistributedOptimizer optimizer(*net, group, sgd(), {.reduce_method = "mean"});
  });
  expect_usage_errors(errors, "already wrapped by DistributedDataParallel");
}

TEST(DistributedBuffers, AreEqualAfterEveryStep) {
  run_ranks(3, [&](ProcessGroup group, int rank) {
    torch::nn::Sequential net(torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 2));
    DistributedOptimizer optimizer(*net, group, sgd(), {.reduce_method = "mean"});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      optimizer.backward(loss_of(net->forward(rows(step, rank, 3))));
      optimizer.step();
      expect_equal_buffers(*net, group);
    }
  });
}

/// Trains a net with running statistics twice. With `module` the optimizer knows of them.
void train_groups(ProcessGroup group, int rank, bool module, BufferSync rule) {
  auto net = seeded<testing::Normed>(1);
  const std::vector<DistributedOptimizer::Group> groups{{named_parameters(*net), {}, group}};
  const DistributedOptimizer::Options options{.reduce_method = "mean", .buffers = rule};
  const auto optimizer = module
                             ? std::make_unique<DistributedOptimizer>(*net, groups, sgd(), options)
                             : std::make_unique<DistributedOptimizer>(groups, sgd(), options);
  for (int step = 0; step < 2; ++step) {
    optimizer->zero_grad();
    optimizer->backward(loss_of(net(rows(step, rank, 2))));
    optimizer->step();
    if (module) expect_equal_buffers(*net, group);
  }
}

TEST(DistributedBuffers, OfParameterGroupsAreEqualWithAModuleAndTheLogSaysSoWithoutOne) {
  const auto log_of = [](bool module, BufferSync rule) {
    ::testing::internal::CaptureStdout();
    run_ranks(2, [&](ProcessGroup group, int rank) { train_groups(group, rank, module, rule); });
    return ::testing::internal::GetCapturedStdout();
  };
  const std::string line = "expected DistributedOptimizer(module, groups, …)";
  EXPECT_EQ(log_of(true, BufferSync::broadcast).find(line), std::string::npos);
  EXPECT_EQ(log_of(false, BufferSync::none).find(line), std::string::npos);
  const auto text = log_of(false, BufferSync::broadcast);
  ASSERT_NE(text.find(line), std::string::npos);
  EXPECT_EQ(text.find(line), text.rfind(line)) << "once";
}

}  // namespace
}  // namespace tessera
