#include <chrono>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

#include "harness/batches.h"
#include "harness/buffers.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"

// Lines of user code that did something else under ZeRO than with the plain optimizer.

namespace tessera {
namespace {

using testing::copies;
using testing::expect_equal_buffers;
using testing::expect_usage_errors;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::message_of;
using testing::Normed;
using testing::rows;
using testing::run_ranks;
using testing::run_ranks_catching;
using testing::seeded;
using testing::thrown_by;
using testing::Uneven;
using Zero = ZeroRedundancyOptimizer;

OptimizerFactory optimizer_of(const std::string& name, const OptionMap& options = {}) {
  return default_optimizers().factory(name, options);
}

TEST(ZeroArchive, TorchSaveHasThePlainOptimizersFormat) {
  for (const char* name : {"Adam", "SGD"}) {
    const OptionMap options = name == std::string("SGD") ? OptionMap{{"lr", 0.1}, {"momentum", 0.9}}
                                                         : OptionMap{{"lr", 0.1}};
    for (const int world : {1, 2, 3}) {
      std::string saved;
      std::vector<at::Tensor> expected;
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(1);
        Zero zero(*net, group, optimizer_of(name, options));
        const auto step = [&](int number) {
          zero.zero_grad();
          loss_of(net(rows(number, rank, world))).backward();
          zero.step();
        };
        step(0);
        step(1);
        EXPECT_THAT(thrown_by([&] {
                      std::ostringstream stream;
                      torch::save(zero, stream);
                    }),
                    HasSubstr("call consolidate_state_dict(rank) on all ranks"));
        zero.consolidate_state_dict(0);
        if (rank == 0) {
          std::ostringstream stream;
          torch::save(zero, stream);
          saved = stream.str();
        }
        step(2);
        if (rank == 0) expected = copies(net->parameters());
      });
      // The plain optimizer over the same parameters reads it.
      auto plain = seeded<Uneven>(1);
      const auto adam =
          optimizer_of(name, options)({torch::optim::OptimizerParamGroup(plain->parameters())});
      std::istringstream stream(saved);
      torch::load(*adam, stream);
      EXPECT_EQ(adam->state().size(), plain->parameters().size()) << name;
      // So does ZeRO, at another world size.
      run_ranks(2, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(1);
        Zero zero(*net, group, optimizer_of(name, options));
        std::istringstream own(saved);
        torch::load(zero, own);
        zero.consolidate_state_dict(-1);
        const auto dict = state_dict(*adam, named_parameters(*plain));
        for (const auto& [parameter, state] : dict.state)
          for (const auto& [key, tensor] : state.tensors)
            EXPECT_TRUE(at::equal(zero.state_dict().state.at(parameter).tensors.at(key), tensor))
                << parameter << " " << key;
      });
    }
  }
}

TEST(ZeroLbfgs, IsLbfgsWithTheAveragedGradients) {
  const torch::optim::LBFGSOptions options =
      torch::optim::LBFGSOptions(0.5).max_iter(5).line_search_fn("strong_wolfe");
  auto plain = seeded<Uneven>(7);
  plain->to(torch::kDouble);
  const auto in_double = [&](const at::Tensor& x) { return x.to(torch::kDouble); };
  torch::optim::LBFGS reference(plain->parameters(), options);
  for (int step = 0; step < 3; ++step) {
    reference.step([&] {
      reference.zero_grad();
      auto loss = loss_of(plain(in_double(rows(0))));
      loss.backward();
      return loss;
    });
  }
  for (const int world : {2, 3, 4}) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(7);
      net->to(torch::kDouble);
      Zero zero(*net, group, optimizer_factory<torch::optim::LBFGS>(options),
                {.partition = Partition::whole});
      for (int step = 0; step < 3; ++step)
        zero.step([&] {
          zero.zero_grad();
          auto loss = loss_of(net(in_double(rows(0, rank, world))));
          loss.backward();
          return loss;
        });
      for (size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TRUE(at::allclose(net->parameters()[i], plain->parameters()[i], 1e-6, 1e-8))
            << "world " << world << " parameter " << i;
    });
  }
}

TEST(ZeroClosure, AnExceptionOnOneRankEndsAllRanks) {
  for (const bool lbfgs : {false, true}) {
    const auto start = std::chrono::steady_clock::now();
    const auto errors = run_ranks_catching(3, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      Zero zero(*net, group,
                lbfgs ? optimizer_factory<torch::optim::LBFGS>(torch::optim::LBFGSOptions(0.1))
                      : optimizer_of("SGD", {{"lr", 0.1}}),
                {.partition = Partition::whole});
      zero.step([&]() -> at::Tensor {
        if (rank == 1) throw std::runtime_error("the disk is on fire");
        auto loss = loss_of(net(rows(0, rank, 3)));
        loss.backward();
        return loss;
      });
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    EXPECT_EQ(message_of(errors[1]), "the disk is on fire");
    for (const int rank : {0, 2})
      EXPECT_THAT(message_of(errors[rank]), HasSubstr("rank 1: the closure of step() threw"));
  }
}

TEST(ZeroGroups, AGroupThatTheBaseClassAddedIsAnError) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    Zero zero(*net, group, optimizer_of("SGD", {{"lr", 0.1}}));
    torch::optim::Optimizer& base = zero;
    base.add_param_group(torch::optim::OptimizerParamGroup({at::ones({2}).requires_grad_()}));
    loss_of(net(rows(0, rank, 2))).backward();
    zero.step();
  });
  expect_usage_errors(errors, "expected add_param_group(ZeroRedundancyOptimizer::Group)");
}

TEST(ZeroOptions, ThatDifferBetweenRanksAreAnErrorOnAllRanks) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    Zero zero(*net, group, optimizer_of("SGD", {{"lr", rank == 0 ? 0.1 : 0.2}}));
  });
  expect_usage_errors(errors, "lr 0.2");
  const auto classes = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    Zero zero(*net, group, optimizer_of(rank == 0 ? "Adam" : "AdamW", {{"lr", 0.1}}));
  });
  expect_usage_errors(classes, "AdamW");
  for (const auto& options : {Zero::Options{}, Zero::Options{.partition = Partition::whole},
                              Zero::Options{.parameters_as_bucket_view = false},
                              Zero::Options{.shard_gradients = true}}) {
    const auto later = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      Zero zero(*net, group, optimizer_of("SGD", {{"lr", 0.1}}), options);
      for (int step = 0; step < 3; ++step) {
        zero.zero_grad();
        loss_of(net(rows(step, rank, 2))).backward();
        zero.step();
        if (step == 1 && rank == 1) zero.param_groups()[0].options().set_lr(0.05);
      }
    });
    expect_usage_errors(later, "lr 0.05");
    expect_usage_errors(later, "lr 0.1");
  }
}

TEST(ZeroBesideDdp, DefaultOptionsUseTheGradientsOfDdp) {
  for (const int world : {1, 2, 3}) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto plain = seeded<Uneven>(1), net = seeded<Uneven>(1);
      const auto sgd = optimizer_of(
          "SGD", {{"lr", 0.1}})({torch::optim::OptimizerParamGroup(plain->parameters())});
      DistributedDataParallel plain_ddp(plain, group), ddp(net, group);
      Zero zero(*net, group, optimizer_of("SGD", {{"lr", 0.1}}));
      EXPECT_FALSE(zero.options().reduce_gradients);
      for (int step = 0; step < 3; ++step) {
        sgd->zero_grad();
        zero.zero_grad();
        loss_of(plain_ddp(rows(step, rank, world))).backward();
        group.reset_stats();
        loss_of(ddp(rows(step, rank, world))).backward();
        sgd->step();
        zero.step();
        EXPECT_EQ(group.stats().reduce_scatter.calls, 0u);
        for (size_t i = 0; i < net->parameters().size(); ++i)
          EXPECT_TRUE(at::equal(net->parameters()[i], plain->parameters()[i])) << step;
      }
    });
  }
}

TEST(ZeroBesideDdp, TheOtherOrderIsAnError) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    Zero zero(*net, group, optimizer_of("SGD", {{"lr", 0.1}}));
    EXPECT_THAT(thrown_by([&] { DistributedDataParallel ddp(net, group); }),
                HasSubstr("construct DistributedDataParallel first"));
  });
}

TEST(ZeroBesideDdp, ParametersThatDdpDoesNotReduceAreAnError) {
  const auto both = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group);
    auto parameters = named_parameters(*net);
    parameters.emplace_back("temperature", at::ones({1}).requires_grad_());
    Zero zero({{parameters, {}}}, group, optimizer_of("SGD", {{"lr", 0.1}}));
  });
  expect_usage_errors(both, "and not that of parameter temperature");
  const auto later = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group);
    Zero zero(*net, group, optimizer_of("SGD", {{"lr", 0.1}}));
    zero.add_param_group({{{"temperature", at::ones({1}).requires_grad_()}}, {}});
  });
  expect_usage_errors(later, "and not that of parameter temperature");
}

TEST(ZeroBuffers, AreRankZerosAtConstructionAndEqualAfterEveryStep) {
  for (const auto rule : {BufferSync::broadcast, BufferSync::mean}) {
    for (const bool shard : {false, true}) {
      for (const int world : {2, 3, 4}) {
        run_ranks(world, [&](ProcessGroup group, int rank) {
          auto net = seeded<Normed>(1);
          auto& mean = net->norm->running_mean;
          mean.fill_(rank + 5);
          Zero zero(*net, group, optimizer_of("SGD", {{"lr", 0.1}}),
                    {.buffers = rule, .shard_gradients = shard});
          EXPECT_EQ(mean[0].item<float>(), 5);
          for (int step = 0; step < 3; ++step) {
            zero.zero_grad();
            loss_of(net(rows(step, rank, world))).backward();
            zero.step();
            expect_equal_buffers(*net, group);
          }
        });
      }
    }
  }
}

TEST(ZeroBuffers, OfParameterGroupsAreEqualWithAModuleAndTheLogSaysSoWithoutOne) {
  const auto log_of = [](bool module, const Zero::Options& options) {
    ::testing::internal::CaptureStdout();
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Normed>(1);
      const std::vector<Zero::Group> groups{{named_parameters(*net), {}}};
      const auto sgd = optimizer_of("SGD", {{"lr", 0.1}});
      const auto zero = module ? std::make_unique<Zero>(*net, groups, group, sgd, options)
                               : std::make_unique<Zero>(groups, group, sgd, options);
      for (int step = 0; step < 2; ++step) {
        zero->zero_grad();
        loss_of(net(rows(step, rank, 2))).backward();
        zero->step();
        if (module) expect_equal_buffers(*net, group);
      }
    });
    return ::testing::internal::GetCapturedStdout();
  };
  const std::string line = "expected ZeroRedundancyOptimizer(module, groups, …)";
  EXPECT_EQ(log_of(true, {}).find(line), std::string::npos);
  EXPECT_EQ(log_of(false, {.buffers = BufferSync::none}).find(line), std::string::npos);
  const auto text = log_of(false, {});
  ASSERT_NE(text.find(line), std::string::npos);
  EXPECT_EQ(text.find(line), text.rfind(line)) << "once";
}

TEST(ZeroNorm, TheInfinityNormSeesANaNOfEveryRank) {
  for (const int culprit : {0, 1, 2}) {
    run_ranks(3, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      Zero zero(*net, group, optimizer_of("SGD", {{"lr", 0.1}}));
      auto x = rows(0, rank, 3);
      if (rank == culprit) x[0][0] = NAN;
      loss_of(net(x)).backward();
      EXPECT_TRUE(std::isnan(zero.clip_grad_norm_(INFINITY, INFINITY)));
      EXPECT_TRUE(std::isnan(zero.clip_grad_norm_(1.0, std::numeric_limits<double>::infinity())));
    });
  }
}

TEST(ZeroState, PartitionAndLocalStateDescribeEveryElementOnce) {
  for (const auto kind : {Partition::flat, Partition::whole}) {
    for (const int world : {1, 2, 3}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(1);
        Zero zero(*net, group, optimizer_of("Adam", {{"lr", 0.1}}), {.partition = kind});
        loss_of(net(rows(0, rank, world))).backward();
        zero.step();
        const auto ranks = zero.partition();
        ASSERT_EQ(ranks.size(), static_cast<size_t>(world));
        std::map<std::string, int64_t> covered;
        for (const auto& ranges : ranks)
          for (const auto& range : ranges) covered[range.parameter] += range.numel;
        for (const auto& entry : net->named_parameters())
          EXPECT_EQ(covered[entry.key()], entry.value().numel()) << entry.key();
        const auto local = zero.rank_local_state_dict();
        ASSERT_EQ(local.state.size(), ranks[rank].size());
        for (const auto& range : ranks[rank])
          EXPECT_EQ(local.state.at(range.parameter).tensors.at("exp_avg").numel(), range.numel);
      });
    }
  }
}

}  // namespace
}  // namespace tessera
