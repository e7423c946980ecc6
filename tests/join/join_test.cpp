#include <chrono>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "join/setups.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using namespace tessera::testing::joined;
using ::testing::AllOf;
using ::testing::HasSubstr;

class JoinOver : public ::testing::TestWithParam<Case> {};

TEST_P(JoinOver, UnequalBatchesEqualOneProcessWithAllBatches) {
  const std::vector<Batches> worlds{{3}, {4, 2}, {5, 3, 0}, {0, 4, 4, 2}, {3, 3}};
  for (const auto& batches : worlds) {
    for (const bool divide_by_world : {true, false}) {
      const auto expected = reference(batches, divide_by_world);
      run_ranks(static_cast<int>(batches.size()), [&](ProcessGroup group, int rank) {
        auto setup = GetParam().make(group);
        join(setup->joinables(), {.divide_by_initial_world_size = divide_by_world},
             [&](JoinLoop& loop) {
               for (int step = 0; step < batches[rank]; ++step) {
                 loop.next();
                 setup->iteration(own_rows(step, rank));
               }
             });
        expect_close(setup->parameters(), expected,
                     "rank " + std::to_string(rank) + " of " + std::to_string(batches.size()));
        // After the join, another iteration of all ranks must work.
        EXPECT_NO_THROW(setup->iteration(own_rows(9, rank)));
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, JoinOver, ::testing::ValuesIn(cases()),
                         [](const auto& tested) { return tested.param.name; });

TEST(Join, WithEqualCountsAnIterationCostsOneNumber) {
  run_ranks(3, [](ProcessGroup group, int rank) {
    DdpSetup setup(group, {});
    const auto traffic = [&](bool joined) {
      group.reset_stats();
      join(setup.joinables(), {.enable = joined}, [&](JoinLoop& loop) {
        for (int step = 0; step < 4; ++step) {
          loop.next();
          setup.iteration(own_rows(step, rank));
        }
      });
      return group.stats();
    };
    traffic(false);  // rebuilds the buckets
    const auto plain = traffic(false), joined = traffic(true);
    EXPECT_EQ(joined.all_reduce.calls, plain.all_reduce.calls + 4 + 1);
    EXPECT_EQ(joined.calls(), plain.calls() + 4 + 1);
    EXPECT_LE(joined.all_reduce.bytes_sent, plain.all_reduce.bytes_sent + 5 * 8);
  });
}

TEST(Join, WithEnableOffItRunsThePlainLoop) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    DdpSetup a(group, {}), b(group, {});
    join(a.joinables(), {.enable = false}, [&](JoinLoop& loop) {
      for (int step = 0; step < 3; ++step) {
        loop.next();
        a.iteration(own_rows(step, rank));
      }
    });
    for (int step = 0; step < 3; ++step) b.iteration(own_rows(step, rank));
    for (size_t i = 0; i < a.net->parameters().size(); ++i)
      EXPECT_TRUE(at::equal(a.net->parameters()[i], b.net->parameters()[i]));
  });
}

TEST(Join, WithThrowOnEarlyTerminationAllRanksThrowNamingTheFirstExhaustedRank) {
  const Batches batches{4, 2, 4};
  std::vector<int> done(3);
  const auto errors = run_ranks_catching(3, [&](ProcessGroup group, int rank) {
    DdpSetup setup(group, {});
    join(setup.joinables(), {.throw_on_early_termination = true}, [&](JoinLoop& loop) {
      for (int step = 0; step < batches[rank]; ++step) {
        loop.next();
        setup.iteration(own_rows(step, rank));
        ++done[rank];
      }
    });
  });
  EXPECT_EQ(done, (std::vector<int>{2, 2, 2}));
  for (const auto& error : errors)
    EXPECT_THAT(message_of(error), HasSubstr("join: rank 1 ran out of data"));
  run_ranks(2, [](ProcessGroup group, int rank) {  // equal counts
    DdpSetup setup(group, {});
    join(setup.joinables(), {.throw_on_early_termination = true}, [&](JoinLoop& loop) {
      loop.next();
      setup.iteration(own_rows(0, rank));
    });
  });
}

TEST(Join, AllRanksGetTheBuffersAndParametersOfTheLastActiveRank) {
  run_ranks(3, [](ProcessGroup group, int rank) {
    auto net = std::make_shared<WithBuffer>();
    DistributedDataParallel ddp(net, group);
    join({ddp}, {}, [&](JoinLoop& loop) {
      for (int step = 0; step < rank + 1; ++step) {
        loop.next();
        net->weight.mutable_grad() = at::Tensor();
        net->mean.fill_(10 * rank + step);
        auto y = ddp(torch::ones({2}));
        // The buffers come from rank 0 while it has data, then from rank 1, then from
        // rank 2.
        EXPECT_EQ(net->mean[0].item<float>(), 10 * step + step) << "rank " << rank;
        y.sum().backward();
        torch::NoGradGuard no_grad;
        net->weight.sub_(net->weight.grad());
      }
    });
    EXPECT_EQ(net->mean[0].item<float>(), 22);
    // In the three steps 3, 2 and 1 of the 3 ranks have a gradient of 1.
    EXPECT_NEAR(net->weight[0].item<float>(), 1 - 1 - 2.0 / 3 - 1.0 / 3, 1e-6);
  });
}

TEST(Join, UserDefinedJoinablesAreShadowedInTheirOrder) {
  struct Sum : Joinable {
    explicit Sum(ProcessGroup g) : group(std::move(g)) {}
    ProcessGroup join_group() const override { return group; }
    void on_join_iteration(const JoinIteration& iteration) override {
      active.push_back(iteration.active_ranks);
    }
    void shadow_step() override { add(0); }
    void finish_join(int last_active_rank) override { last = last_active_rank; }
    void add(double value) {
      auto sum = at::full({1}, value, at::kDouble);
      group.all_reduce(sum);
      total += sum.item<double>();
    }
    ProcessGroup group;
    std::vector<int> active;
    double total = 0;
    int last = -1;
  };
  run_ranks(3, [](ProcessGroup group, int rank) {
    Sum ones(group), tens(group);
    join({ones, tens}, {}, [&](JoinLoop& loop) {
      for (int step = 0; step < 2 * rank; ++step) {
        loop.next();
        ones.add(1);
        tens.add(10);
      }
    });
    EXPECT_EQ(ones.total, 6);
    EXPECT_EQ(tens.total, 60);
    EXPECT_EQ(ones.last, 2);
    EXPECT_EQ(ones.active, (std::vector<int>{2, 2, 1, 1, 3}));
  });
}

TEST(Join, AUserDefinedJoinableShadowsClipping) {
  struct Clip : Joinable {
    explicit Clip(ZeroRedundancyOptimizer& z) : zero(z) {}
    ProcessGroup join_group() const override { return zero.join_group(); }
    void shadow_step() override {
      zero.shadow_backward();
      zero.clip_grad_norm_(0.1);
      zero.step();
    }
    void on_join_iteration(const JoinIteration& iteration) override {
      zero.on_join_iteration(iteration);
    }
    ZeroRedundancyOptimizer& zero;
  };
  std::vector<std::vector<at::Tensor>> results(2);
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    ZeroRedundancyOptimizer zero(*net, group, adamw_factory());
    Clip clipped(zero);
    join({clipped}, {}, [&](JoinLoop& loop) {
      for (int step = 0; step < 4 - 3 * rank; ++step) {
        loop.next();
        zero.zero_grad();
        loss_of(net(own_rows(step, rank))).backward();
        zero.clip_grad_norm_(0.1);
        zero.step();
      }
    });
    results[rank] = copies(net->parameters());
  });
  expect_close(results[0], results[1], "clipped");
}

TEST(Join, IfARankThrowsTheOthersThrowWithItsRankAndMessage) {
  for (const auto& tested : cases()) {
    for (const int failing : {0, 2}) {
      const auto start = std::chrono::steady_clock::now();
      const auto errors = run_ranks_catching(3, [&](ProcessGroup group, int rank) {
        auto setup = tested.make(group);
        join(setup->joinables(), {}, [&](JoinLoop& loop) {
          for (int step = 0; step < (rank == 1 ? 1 : 5); ++step) {  // rank 1 is out of data then
            loop.next();
            if (rank == failing && step == 3) throw std::runtime_error("a bad record in shard 7");
            setup->iteration(own_rows(step, rank));
          }
        });
      });
      const auto seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      EXPECT_LT(seconds, 5) << tested.name;
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_THAT(message_of(errors[rank]), HasSubstr("a bad record in shard 7"))
            << tested.name << " rank " << rank;
        if (rank != failing)
          EXPECT_THAT(message_of(errors[rank]),
                      HasSubstr("join: rank " + std::to_string(failing) + ":"))
              << tested.name;
      }
    }
  }
}

TEST(Join, AnErrorThatAllRanksThrowIsNotReportedAgainByJoin) {
  const auto errors = run_ranks_catching(3, [&](ProcessGroup group, int rank) {
    DdpSetup setup(group, {.bucket_cap_mb = kTiny});
    join(setup.joinables(), {}, [&](JoinLoop& loop) {
      loop.next();
      auto x = torch::tanh(setup.net->second(own_rows(0, rank)));
      if (rank == 1) loss_of(x).backward();  // without last.*
      else setup.iteration(own_rows(0, rank));
    });
  });
  for (const auto& error : errors) {
    EXPECT_THAT(message_of(error),
                AllOf(HasSubstr("DistributedDataParallel: rank 1"), HasSubstr("last.weight")));
    EXPECT_THAT(message_of(error), ::testing::Not(HasSubstr("join:")));
  }
}

TEST(Join, RefusesAnEmptyListAndJoinablesOfDifferentRanks) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    EXPECT_THROW(join({}, {}, [](JoinLoop&) {}), UsageError);
    DdpSetup all(group, {});
    auto alone = *group.split(rank);
    DdpSetup one(alone, {});
    EXPECT_THROW(join({*all.ddp, *one.ddp}, {}, [](JoinLoop&) {}), UsageError);
  });
}

}  // namespace
