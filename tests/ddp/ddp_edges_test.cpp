#include <algorithm>
#include <chrono>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include "harness/batches.h"
#include "harness/buffers.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/zero_redundancy_optimizer.h"

// Lines of user code that trained something else than the same line without ranks.

namespace tessera {
namespace {

using testing::expect_equal_buffers;
using testing::expect_usage_errors;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::Normed;
using testing::rows;
using testing::run_ranks;
using testing::run_ranks_catching;
using testing::seeded;
using testing::thrown_by;
using testing::Uneven;

TEST(DdpBuffers, AreTheSameOnAllRanksAfterEveryStep) {
  for (const auto rule : {BufferSync::broadcast, BufferSync::mean}) {
    for (const int world : {2, 3, 4}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Normed>(1);
        DistributedDataParallel ddp(net, group, {.buffers = rule});
        torch::optim::SGD sgd(net->parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          sgd.zero_grad();
          loss_of(ddp(rows(step, rank, world))).backward();
          sgd.step();
          expect_equal_buffers(*net, group);
        }
      });
    }
  }
}

TEST(DdpBuffers, BroadcastGivesRankZerosAndMeanTheMean) {
  for (const auto rule : {BufferSync::broadcast, BufferSync::mean, BufferSync::none}) {
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Normed>(1), alone = seeded<Normed>(1);
      DistributedDataParallel ddp(net, group, {.buffers = rule});
      loss_of(ddp(rows(0, rank, 2))).backward();
      std::vector<at::Tensor> of_rank;
      for (int r = 0; r < 2; ++r) {
        auto copy = seeded<Normed>(1);
        copy(rows(0, r, 2));
        of_rank.push_back(copy->norm->running_mean.clone());
      }
      const auto expected = rule == BufferSync::broadcast ? of_rank[0]
                            : rule == BufferSync::none    ? of_rank[rank]
                                                          : (of_rank[0] + of_rank[1]) * 0.5;
      EXPECT_TRUE(at::equal(net->norm->running_mean, expected)) << buffer_sync_name(rule);
      EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 1);
    });
  }
}

TEST(DdpBuffers, AGraphThatIsKeptStaysValid) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Normed>(1);
    DistributedDataParallel ddp(net, group);
    auto first = loss_of(ddp(rows(0, rank, 2)));
    auto second = loss_of(ddp(rows(1, rank, 2)));
    {
      auto no_sync = ddp.no_sync();
      first.backward();
    }
    second.backward();
  });
}

TEST(DdpForward, OneRankAloneMayEvaluateAtAnyTime) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Normed>(1);
    DistributedDataParallel ddp(net, group);
    for (int step = 0; step < 3; ++step) {
      loss_of(ddp(rows(step, rank, 2))).backward();
      if (rank == 0) {
        torch::NoGradGuard no_grad;
        ddp(rows(9));
      }
      if (rank == 1) {
        net->eval();
        ddp(rows(9));
        net->train();
      }
    }
  });
}

TEST(DdpPasses, ABackwardThatOneRankSkipsIsAnErrorOnAllRanks) {
  for (const int world : {2, 3, 4}) {
    const auto start = std::chrono::steady_clock::now();
    const auto errors = run_ranks_catching(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      DistributedDataParallel ddp(net, group);
      for (int step = 0; step < 5; ++step) {
        auto loss = loss_of(ddp(rows(step, rank, world)));
        if ((rank == 0 && step == 1) || (rank == 1 && step == 3)) continue;
        loss.backward();
      }
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    for (const char* count : {"backward 2, after 3 forward", "backward 2, after 2 forward"})
      expect_usage_errors(errors, count);
  }
}

TEST(DdpPasses, AnUnequalNumberOfForwardsWithoutGradientsIsNoError) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group);
    for (int step = 0; step < 3; ++step) {
      for (int extra = 0; extra < rank * step; ++extra) {
        torch::NoGradGuard no_grad;
        ddp(rows(7));
      }
      loss_of(ddp(rows(step, rank, 2))).backward();
    }
  });
}

TEST(DdpStaticGraph, ALayerThatIsFrozenOnOneRankOnlyIsAnErrorOnAllRanks) {
  for (const int frozen_on : {0, 1}) {
    const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      DistributedDataParallel ddp(net, group, {.static_graph = true});
      for (int step = 0; step < 3; ++step) {
        if (step == 2 && frozen_on == rank) net->second->weight.set_requires_grad(false);
        net->zero_grad();
        loss_of(ddp(rows(step, rank, 2))).backward();
      }
    });
    expect_usage_errors(errors, "rank");
  }
}

TEST(DdpStaticGraph, ALayerThatIsFrozenWithinAStepIsAnErrorOnAllRanks) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group, {.static_graph = true});
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      auto loss = loss_of(ddp(rows(step, rank, 2)));
      if (step == 1) loss = loss_of(net->first(rows(step, rank, 2)));
      loss.backward();
    }
  });
  expect_usage_errors(errors, "got 0 gradients in this backward and 1 in the first one");
}

TEST(DdpParameters, ConvertedAfterConstructionAreAnErrorOnAllRanks) {
  for (const int converted_on : {0, 2}) {  // 2: on both
    const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      DistributedDataParallel ddp(net, group);
      loss_of(ddp(rows(0, rank, 2))).backward();
      if (converted_on == 2 || converted_on == rank) net->to(torch::kDouble);
      net->zero_grad();
      const bool converted = net->scale.scalar_type() == torch::kDouble;
      loss_of(ddp(rows(1, rank, 2).to(converted ? at::kDouble : at::kFloat))).backward();
    });
    expect_usage_errors(errors, "is no longer collected");
  }
}

TEST(DdpOptions, AMisspeltIgnoredParameterIsAnErrorWithTheNearestName) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group, {.parameters_to_ignore = {"secnd.weight"}});
  });
  expect_usage_errors(errors, "secnd.weight");
  expect_usage_errors(errors, "second.weight");
}

TEST(DdpHooks, CompressedMeansOfLargeGradientsDoNotOverflow) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallelOptions options;
    options.comm_hook = fp16_compress_hook();
    DistributedDataParallel ddp(net, group, options);
    auto loss = (net->scale * 40000).sum();
    for (const auto& parameter : net->parameters()) loss = loss + 0 * parameter.sum();
    loss.backward();
    EXPECT_NEAR(net->scale.grad().item<float>(), 40000, 16);
  });
}

TEST(NoSyncScope, MayBeMoved) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group);
    std::optional<NoSync> scope;
    for (int step = 0; step < 8; ++step) {
      if (step % 4 < 3) scope = ddp.no_sync();
      else scope.reset();
      group.reset_stats();
      loss_of(ddp(rows(step, rank, 2))).backward();
      EXPECT_EQ(group.stats().all_reduce.calls > 0, step % 4 == 3) << step;
    }
    NoSync one = ddp.no_sync();
    NoSync other = std::move(one);
    group.reset_stats();
    loss_of(ddp(rows(0, rank, 2))).backward();
    EXPECT_EQ(group.stats().all_reduce.calls, 0u);
    { NoSync last = std::move(other); }
    loss_of(ddp(rows(0, rank, 2))).backward();
    EXPECT_GT(group.stats().all_reduce.calls, 0u);
  });
}

TEST(WrappedTwice, IsAnErrorThatNamesTheOtherWrapper) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group);
    EXPECT_THAT(thrown_by([&] { DistributedDataParallel again(net, group); }),
                HasSubstr("already wrapped by DistributedDataParallel"));
  });
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    { DistributedDataParallel ddp(net, group); }
    DistributedDataParallel again(net, group);  // the first one is gone
    loss_of(again(rows(0, rank, 2))).backward();
  });
}

}  // namespace
}  // namespace tessera
