#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include "fsdp/models.h"
#include "join/setups.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using joined::Batches;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A model of any type under FullyShardedDataParallel, with its optimizer and iteration.
template <class Net>
struct Loop {
  Net net;
  std::unique_ptr<FullyShardedDataParallel<Net>> fsdp;  // null: one process
  std::unique_ptr<torch::optim::Optimizer> optimizer;

  explicit Loop(Net of) : net(std::move(of)), optimizer(sgd(net->parameters())) {}
  Loop(Net of, ProcessGroup group, FullyShardedDataParallelOptions options)
      : net(std::move(of)),
        fsdp(std::make_unique<FullyShardedDataParallel<Net>>(net, group, options)) {
    optimizer = sgd(fsdp->parameters());
    fsdp->set_shadow_step([this] {
      optimizer->zero_grad();
      fsdp->shadow_backward();
      optimizer->step();
    });
  }

  static std::unique_ptr<torch::optim::Optimizer> sgd(std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(0.2).momentum(0.9));
  }
  void iteration(int step, int rank) {
    optimizer->zero_grad();
    loss_of((*fsdp)(own_rows(step, rank))).backward();
    optimizer->step();
  }
  void train(const Batches& batches, int rank) {
    join({*fsdp}, {}, [&](JoinLoop& loop) {
      for (int step = 0; step < batches[rank]; ++step) {
        loop.next();
        iteration(step, rank);
      }
    });
  }
  std::vector<at::Tensor> parameters() {
    const auto whole = fsdp->summon_full_params("", false);
    return copies(net->parameters());
  }
};

/// The parameters of one process that trains on all batches. Ranks without a batch count as zero.
template <class Net>
std::vector<at::Tensor> one_process(Net net, const Batches& batches) {
  Loop<Net> one(net);
  for (int step = 0; step < joined::longest(batches); ++step) {
    one.optimizer->zero_grad();
    std::vector<at::Tensor> losses;
    const auto before = one.net->step;
    for (size_t rank = 0; rank < batches.size(); ++rank) {
      one.net->step = before;
      if (step < batches[rank])
        losses.push_back(loss_of(one.net(own_rows(step, static_cast<int>(rank)))));
    }
    one.net->step = before + 1;
    (at::stack(losses).sum() / static_cast<double>(batches.size())).backward();
    one.optimizer->step();
  }
  return copies(one.net->parameters());
}

TEST(JoinFsdp, ARankWithoutDataFollowsUnitsThatItHasNeverUsed) {
  // The model skips a block in odd steps. One rank has no data from the start, another one stops
  // after a step in which the block was skipped.
  for (const auto& batches : std::vector<Batches>{{0, 5}, {5, 2, 0}, {1, 4, 4}}) {
    const auto expected = one_process(seeded<Skipping>(3), batches);
    auto background = every_leaf();
    background.overlap = Overlap::background;
    // With the last options the model is one unit, of which odd steps use a part.
    for (const auto& options : {every_leaf(), background, FullyShardedDataParallelOptions{}}) {
      run_ranks(static_cast<int>(batches.size()), [&](ProcessGroup group, int rank) {
        Loop<Skipping> loop(seeded<Skipping>(3), group, options);
        loop.train(batches, rank);
        expect_close(loop.parameters(), expected, "rank " + std::to_string(rank));
      });
    }
  }
}

TEST(JoinFsdp, HybridShardEqualsOneProcess) {
  const Batches batches{1, 4, 0, 2};
  const auto expected = joined::reference(batches, true);
  run_ranks(4, [&](ProcessGroup group, int rank) {
    joined::FsdpSetup setup(group, {.wrap_policy = wrap_leaves(),
                                    .sharding_strategy = ShardingStrategy::hybrid_shard,
                                    .shard_group_size = 2});
    join(setup.joinables(), {}, [&](JoinLoop& loop) {
      for (int step = 0; step < batches[rank]; ++step) {
        loop.next();
        setup.iteration(own_rows(step, rank));
      }
    });
    expect_close(setup.parameters(), expected, "rank " + std::to_string(rank));
  });
}

TEST(JoinFsdp, ARankWithoutDataMakesTheSameGathersReductionsAndPrefetches) {
  std::vector<FsdpStats> joint(3), after(3);
  std::vector<CommStats> traffic(3);
  // In shared memory forward gathers nothing early.
  run_ranks_on({0, 1, 2}, [&](ProcessGroup group, int rank) {
    Loop<Twice> loop(seeded<Twice>(1), group, every_leaf());
    loop.iteration(0, rank);
    loop.fsdp->reset_stats();
    group.reset_stats();
    loop.train({3, 1, 3}, rank);
    joint[rank] = loop.fsdp->stats();
    traffic[rank] = group.stats();
    loop.fsdp->reset_stats();
    loop.iteration(7, rank);
    after[rank] = loop.fsdp->stats();
  });
  const auto units = 4u;  // 3 layers and the root
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(joint[rank].reductions, 3 * units);
    EXPECT_EQ(traffic[rank].reduce_scatter.calls, 3 * units);
    EXPECT_EQ(traffic[rank].all_gather.calls,
              joint[rank].gathers_forward + joint[rank].gathers_backward + 1)
        << "one more to find the last active rank";
    EXPECT_GT(joint[rank].prefetches, 0u);
    for (const auto member :
         {&FsdpStats::gathers_forward, &FsdpStats::gathers_backward, &FsdpStats::prefetches}) {
      EXPECT_EQ(joint[rank].*member, joint[0].*member) << rank;
      EXPECT_EQ(joint[rank].*member, 3 * (after[rank].*member)) << rank;
    }
    EXPECT_EQ(joint[rank].peak_gradient_bytes, joint[0].peak_gradient_bytes);
  }
}

TEST(JoinFsdp, WithEqualCountsNoUnitIsBroadcast) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    Loop<Twice> loop(seeded<Twice>(1), group, every_leaf());
    const auto calls = [&](bool joined) {
      group.reset_stats();
      if (joined) loop.train({2, 2}, rank);
      else
        for (int step = 0; step < 2; ++step) loop.iteration(step, rank);
      return group.stats();
    };
    calls(false);
    const auto plain = calls(false), joined = calls(true);
    EXPECT_EQ(joined.bytes.calls, 0u);
    EXPECT_EQ(joined.calls(), plain.calls() + 2 + 1);
  });
}

TEST(JoinFsdp, MicroBatchesUnderNoSyncFormOneStep) {
  const Batches batches{4, 1, 0};
  for (const bool divide_by_world : {true, false}) {
    auto one = seeded<Uneven>(1);
    auto plain = adamw(one->parameters());
    for (int step = 0; step < 4; ++step) {
      plain->zero_grad();
      const int active = step < 1 ? 2 : 1;
      for (int rank = 0; rank < active; ++rank) {
        for (int micro = 0; micro < 3; ++micro) {
          (loss_of(one(own_rows(10 * step + micro, rank))) / (divide_by_world ? 3 : active))
              .backward();
        }
      }
      plain->step();
    }
    run_ranks(3, [&](ProcessGroup group, int rank) {
      joined::FsdpSetup setup(group, every_leaf());
      setup.fsdp->reset_stats();
      join(setup.joinables(), {.divide_by_initial_world_size = divide_by_world},
           [&](JoinLoop& loop) {
             for (int step = 0; step < batches[rank]; ++step) {
               loop.next();
               setup.optimizer->zero_grad();
               {
                 const auto pause = setup.fsdp->no_sync();
                 for (int micro = 0; micro < 2; ++micro)
                   loss_of((*setup.fsdp)(own_rows(10 * step + micro, rank))).backward();
               }
               loss_of((*setup.fsdp)(own_rows(10 * step + 2, rank))).backward();
               setup.optimizer->step();
             }
           });
      EXPECT_EQ(setup.fsdp->stats().reductions, 4u * 4u) << rank;
      expect_close(setup.parameters(), copies(one->parameters()), "rank " + std::to_string(rank));
    });
  }
}

/// Accumulates two backwards in the shards; `zero_grad` clears the gradients before.
void expect_accumulation_equals_one_process(
    const std::function<void(joined::FsdpSetup&)>& zero_grad) {
  std::vector<std::vector<double>> norms(2);
  run_ranks(2, [&](ProcessGroup group, int rank) {
    joined::FsdpSetup setup(group, every_leaf());
    const auto iteration = [&](const std::function<void(int micro)>& backward) {
      zero_grad(setup);
      for (int micro = 0; micro < 2; ++micro) backward(micro);
      norms[rank].push_back(setup.fsdp->clip_grad_norm_(0.1));
      setup.optimizer->step();
    };
    setup.fsdp->set_shadow_step([&] { iteration([&](int) { setup.fsdp->shadow_backward(); }); });
    join(setup.joinables(), {}, [&](JoinLoop& loop) {
      for (int step = 0; step < 3 - 3 * rank; ++step) {
        loop.next();
        iteration([&](int micro) {
          loss_of((*setup.fsdp)(own_rows(10 * step + micro, rank))).backward();
        });
      }
    });
  });
  auto one = seeded<Uneven>(1);
  auto plain = adamw(one->parameters());
  ASSERT_EQ(norms[0].size(), 3u);
  EXPECT_EQ(norms[0], norms[1]);
  for (int step = 0; step < 3; ++step) {
    plain->zero_grad();
    for (int micro = 0; micro < 2; ++micro)
      (loss_of(one(own_rows(10 * step + micro, 0))) / 2).backward();
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(one->parameters(), 0.1), norms[0][step], 1e-5);
    plain->step();
  }
}

TEST(JoinFsdp, AccumulationInTheShardsAndClippingEqualOneProcess) {
  expect_accumulation_equals_one_process(
      [](joined::FsdpSetup& setup) { setup.optimizer->zero_grad(); });
}

TEST(JoinFsdp, ZeroGradOfTheModuleWorksOnRanksWithoutData) {
  for (const bool set_to_none : {false, true}) {
    expect_accumulation_equals_one_process(
        [&](joined::FsdpSetup& setup) { setup.net->zero_grad(set_to_none); });
  }
}

TEST(JoinFsdp, AllRanksAgreeWithMixedPrecisionAndFrozenParameters) {
  std::vector<std::vector<at::Tensor>> results(3);
  run_ranks(3, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    net->second->weight.set_requires_grad(false);
    auto options = every_leaf();
    options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    Loop<Uneven> loop(net, group, options);
    loop.train({0, 2, 5}, rank);
    results[rank] = loop.parameters();
    EXPECT_EQ(loop.fsdp->stats().reductions, 5 * 4u);
  });
  for (int rank = 1; rank < 3; ++rank)
    for (size_t i = 0; i < results[0].size(); ++i)
      EXPECT_TRUE(at::equal(results[rank][i], results[0][i]));
}

TEST(JoinFsdp, GradientsInEvaluationModeHaveFullPrecisionOnAllRanks) {
  for (const auto& batches : {Batches{0, 2, 5}, Batches{3, 1, 1}}) {
    run_ranks(3, [&](ProcessGroup group, int rank) {
      Loop<Uneven> full(seeded<Uneven>(1), group, every_leaf());
      full.train(batches, rank);
      const auto expected = full.parameters();
      auto options = every_leaf();
      options.mixed_precision = {
          .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .full_precision_in_eval = true};
      Loop<Uneven> loop(seeded<Uneven>(1), group, options);
      if (batches[rank] > 0) loop.net->eval();  // a rank without any data need not
      loop.train(batches, rank);
      const auto got = loop.parameters();
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(at::allclose(got[i], expected[i], 1e-5, 1e-6))
            << i;  // bfloat16 would be off by 1e-3
    });
  }
}

TEST(JoinFsdp, AllRanksGetTheBuffersOfTheLastActiveRank) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<torch::nn::BatchNorm1d>(1, torch::nn::BatchNorm1dOptions(3));
    Loop<torch::nn::BatchNorm1d> loop(net, group, {});
    loop.train({4, 2}, rank);
    EXPECT_EQ(net->num_batches_tracked.item<int>(), 4);
    auto mean = group.all_gather(net->running_mean).view({2, 3});
    EXPECT_TRUE(at::equal(mean[0], mean[1]));
  });
}

TEST(JoinFsdp, TheGivenIterationMayMakeForwardPassesWithoutGradients) {
  const auto expected = joined::reference({3, 1}, true);
  run_ranks(2, [&](ProcessGroup group, int rank) {
    joined::FsdpSetup setup(group, every_leaf());
    const auto evaluate = [&] {
      at::NoGradGuard no_grad;
      return (*setup.fsdp)(own_rows(5, 0)).sum().template item<float>();
    };
    setup.fsdp->set_shadow_step([&] {
      setup.optimizer->zero_grad();
      setup.fsdp->shadow_backward();
      setup.optimizer->step();
      evaluate();
    });
    join(setup.joinables(), {}, [&](JoinLoop& loop) {
      for (int step = 0; step < 3 - 2 * rank; ++step) {
        loop.next();
        setup.iteration(own_rows(step, rank));
        evaluate();
      }
    });
    expect_close(setup.parameters(), expected, "rank " + std::to_string(rank));
  });
}

TEST(JoinFsdp, IfARankOfAHybridGroupThrowsTheOthersEnd) {
  const auto start = std::chrono::steady_clock::now();
  const auto errors = run_ranks_catching(4, [](ProcessGroup group, int rank) {
    joined::FsdpSetup setup(group, {.wrap_policy = wrap_leaves(),
                                    .sharding_strategy = ShardingStrategy::hybrid_shard,
                                    .shard_group_size = 2});
    join(setup.joinables(), {}, [&](JoinLoop& loop) {
      for (int step = 0; step < 5; ++step) {
        loop.next();
        if (rank == 2 && step == 2) throw std::runtime_error("a bad record");
        setup.iteration(own_rows(step, rank));
      }
    });
  });
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 5);
  EXPECT_THAT(message_of(errors[2]), HasSubstr("a bad record"));
  EXPECT_THAT(message_of(errors[3]), HasSubstr("join: rank 2: a bad record"));
  for (const int rank : {0, 1}) EXPECT_TRUE(errors[rank]) << rank;
}

TEST(JoinFsdp, WithoutAShadowStepJoinIsRefused) {
  const auto errors = run_ranks_catching(2, [](ProcessGroup group, int rank) {
    Loop<Uneven> loop(seeded<Uneven>(1), group, {});
    loop.fsdp->set_shadow_step(nullptr);
    loop.train({1, 3}, rank);
  });
  for (const auto& error : errors)
    EXPECT_THAT(message_of(error),
                AllOf(HasSubstr("FullyShardedDataParallel: rank 0"), HasSubstr("set_shadow_step")));
}

}  // namespace
