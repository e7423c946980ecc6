// Overlap::background: backward returns before the other ranks' gradients have arrived.
#include <array>
#include <chrono>
#include <future>
#include <map>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ddp/background_model.h"
#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/error.h"
#include "tessera/optim.h"
#include "tessera/step/clip_grad.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;

/// Gradients of the same backward without the option.
std::vector<at::Tensor> expected_gradients(const ProcessGroup& group) {
  Warm plain(group, false);
  plain.backward(1);
  return copies(plain.gradients());
}

TEST(DdpBackground, TrainsBitByBitAsABackwardThatWaits) {
  for (const auto& hosts : kPlacements) {
    expect_same_training(hosts, adamw);
    expect_same_training(hosts, torch_adam);
    expect_same_training(hosts, adamw, {.find_unused_parameters = true});
    expect_same_training(hosts, torch_adam, {.static_graph = true});
    expect_same_training(hosts, adamw, {}, Overlap::none);
  }
}

TEST(DdpBackground, TrainsBitByBitWithRoundedGradients) {
  for (const auto& hosts : {Hosts{0, 1}, {0, 0, 1}, {0, 1, 0, 1}})
    for (const auto format : {WireFormat::bfloat16, WireFormat::int8})
      expect_same_training(hosts, adamw, {.wire = {.gradients = format}});
}

/// Rank 1 begins its backward when rank 0's has returned.
TEST(DdpBackground, BackwardReturnsBeforeOtherRanksHaveBegunTheirs) {
  for (const auto& hosts : {Hosts{0, 1}, {0, 0}}) {
    std::promise<void> returned;
    run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
      const auto expected = expected_gradients(group);
      Warm warm(group, true);
      if (rank == 1) {
        const auto waited = returned.get_future().wait_for(std::chrono::seconds(10));
        ASSERT_EQ(waited, std::future_status::ready);
      }
      warm.backward(1);
      if (rank == 0) {
        for (const auto& gradient : warm.gradients()) EXPECT_FALSE(has_memory(gradient));
        returned.set_value();
      }
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(at::equal(warm.gradients()[i], expected[i]));
    });
  }
}

TEST(DdpBackground, AliasesClippingAndCollectivesWait) {
  run_ranks_on({0, 1, 1}, [](ProcessGroup group, int) {
    const auto expected = expected_gradients(group);
    const auto& last = expected[expected.size() - 2];
    const auto backward = [&] {
      Warm fresh(group, true);
      fresh.backward(1);
      return fresh;
    };
    {
      auto fresh = backward();
      EXPECT_TRUE(at::equal(fresh.gradient()[1], last[1]));
    }
    {
      auto fresh = backward();
      EXPECT_TRUE(at::equal(fresh.gradient().detach(), last));
    }
    {
      auto fresh = backward();
      auto sum = fresh.gradient();
      group.all_reduce(sum, 1.0 / 3);
      EXPECT_TRUE(at::allclose(sum, last));
    }
    {
      auto fresh = backward();
      const double norm = clip_gradient_norm_(fresh.gradients(), 1e9);
      double squares = 0;
      for (const auto& gradient : expected) squares += gradient.square().sum().item<double>();
      EXPECT_NEAR(norm, std::sqrt(squares), 1e-6);
    }
    {
      auto fresh = backward();
      fresh.ddp->wait();
      for (const auto& gradient : fresh.gradients()) EXPECT_TRUE(has_memory(gradient));
    }
    {
      auto fresh = backward();
      fresh.net->zero_grad(false);
      EXPECT_EQ(fresh.gradient().abs().sum().item<double>(), 0);
      EXPECT_EQ(fresh.net->first->weight.grad().abs().sum().item<double>(), 0);
    }
  });
}

TEST(DdpBackground, ASecondBackwardAddsToGradientsThatHaveNotArrived) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    const auto twice = [&](bool background) {
      Warm warm(group, background);
      const auto x = rows(1, rank, group.size());
      const auto loss = loss_of((*warm.ddp)(x));
      loss.backward({}, true);
      loss.backward();  // without a forward between them
      warm.backward(2);
      return copies(warm.gradients());
    };
    const auto with = twice(true), without = twice(false);
    for (size_t i = 0; i < with.size(); ++i) EXPECT_TRUE(at::equal(with[i], without[i])) << i;
  });
}

/// Without a forward between them, the second backward would fill buckets that are being reduced.
TEST(DdpBackground, ABackwardWaitsForTheReductionsOfTheLastOne) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    const auto after_two = [&](bool background) {
      Warm warm(group, background);
      const auto loss = loss_of((*warm.ddp)(rows(1, rank, group.size())));
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
      loss.backward({}, true);
      clear_gradients(warm.net->parameters());
      (loss * 3).backward();
      return copies(warm.gradients());
    };
    const auto with = after_two(true), without = after_two(false);
    for (size_t i = 0; i < with.size(); ++i) EXPECT_TRUE(at::equal(with[i], without[i])) << i;
  });
}

TEST(DdpBackground, TheWrapperMayEndWhileGradientsArrive) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int) {
    const auto expected = expected_gradients(group);
    Warm warm(group, true);
    warm.backward(1);
    warm.ddp.reset();
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(has_memory(warm.gradients()[i]));
      EXPECT_TRUE(at::equal(warm.gradients()[i], expected[i]));
    }
  });
}

TEST(DdpBackground, MovesTheSameBytes) {
  for (const auto& hosts : {Hosts{0, 1, 1}, {0, 0}}) {
    run_ranks_on(hosts, [](ProcessGroup group, int) {
      const auto reduced = [&](bool background) {
        Warm warm(group, background);
        group.reset_stats();
        warm.backward(1);
        warm.ddp->wait();
        const auto stats = group.stats();
        return std::array<uint64_t, 3>{stats.all_reduce.calls, stats.all_reduce.bytes_sent,
                                       stats.all_reduce.bytes_received};
      };
      EXPECT_EQ(reduced(true), reduced(false));
    });
  }
}

TEST(DdpBackground, ZeroWithoutReductionsOfItsOwnWaits) {
  run_ranks_on({0, 1, 1}, [](ProcessGroup group, int rank) {
    const auto train = [&](bool background, bool early, WireFormat format) {
      auto net = seeded<Uneven>(8);
      Model ddp(net, group, small_buckets(background));
      ZeroRedundancyOptimizer zero(*net, group, adamw_factory(),
                                   {.reduce_gradients = false, .wire = {.parameters = format}});
      for (int i = 0; i < 4; ++i) {
        loss_of(ddp(rows(i, rank, group.size()))).backward();
        if (early) zero.clip_grad_norm_(0.1);
        zero.step();
        zero.zero_grad();
      }
      return net;
    };
    for (const bool clip : {false, true})
      for (const auto format : {WireFormat::float32, WireFormat::int8})
        expect_same_weights(train(true, clip, format), train(false, clip, format));
  });
}

/// torch::optim::Adam takes first the gradients that are reduced last.
TEST(DdpBackground, ARankThatSkipsBackwardIsNoticedAtOnce) {
  for (const auto optimizer : {adamw, torch_adam}) {
    const auto begin = std::chrono::steady_clock::now();
    expect_usage_errors(run_ranks_catching(2,
                                           [&](ProcessGroup group, int rank) {
                                             Warm warm(group, true, optimizer);
                                             auto loss = loss_of((*warm.ddp)(rows(0, rank, 2)));
                                             auto metric = torch::ones({1});
                                             if (rank == 0) loss.backward();
                                             else group.all_reduce(metric);
                                             warm.step();
                                             group.barrier();
                                           },
                                           {.timeout = std::chrono::seconds(30)}, {0, 1}),
                        "bucket 0 of backward 3");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  }
}

TEST(DdpBackground, WithAHookBackwardWaits) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    auto options = small_buckets(true);
    options.comm_hook = bf16_compress_hook();
    auto net = seeded<Uneven>(8);
    Model ddp(net, group, options);
    for (int i = 0; i < 3; ++i) {
      loss_of(ddp(rows(i, rank, 2))).backward();
      EXPECT_TRUE(has_memory(net->last->weight.grad()));
    }
  });
}

TEST(DdpBackground, RanksWithDifferentOverlapAreAnError) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    EXPECT_THAT(thrown_by([&] { Model(net, group, small_buckets(rank == 0)); }),
                HasSubstr("overlap"));
  });
}

}  // namespace
