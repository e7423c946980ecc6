#include "tessera/step/power_sgd.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "harness/models.h"
#include "harness/ranks.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/error.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;

/// One bucket with a matrix [20, 12], a kernel [8, 3, 5], a vector, and a matrix that is too small
/// to be compressed.
struct Gradients {
  explicit Gradients(int64_t seed) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
    bucket.flat = at::randn({240 + 120 + 7 + 4}, generator);
    bucket.names = {"matrix", "kernel", "vector", "small"};
    bucket.gradients = {bucket.flat.narrow(0, 0, 240).view({20, 12}),
                        bucket.flat.narrow(0, 240, 120).view({8, 3, 5}),
                        bucket.flat.narrow(0, 360, 7), bucket.flat.narrow(0, 367, 4).view({2, 2})};
  }
  GradientBucket bucket;
};

at::Tensor mean_of(int step, int world) {
  at::Tensor sum;
  for (int rank = 0; rank < world; ++rank) {
    const auto flat = Gradients(100 * step + rank).bucket.flat;
    sum = sum.defined() ? sum + flat : flat;
  }
  return sum / world;
}

TEST(PowerSgd, WithFullRankTheResultIsTheMean) {
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      PowerSgd power({.rank = 100, .start_iteration = 0, .min_compression_rate = 1e-6});
      const auto hook = power.hook();
      for (int step = 0; step < 3; ++step) {
        Gradients mine(100 * step + rank);
        hook(group, mine.bucket)();
        EXPECT_TRUE(at::allclose(mine.bucket.flat, mean_of(step, world), 1e-4, 1e-5))
            << "world " << world;
      }
    });
  }
}

TEST(PowerSgd, SendsTheBytesOfTheFactors) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    PowerSgd power({.rank = 2, .start_iteration = 1, .min_compression_rate = 1.5});
    const auto hook = power.hook();
    for (int step = 0; step < 3; ++step) {
      Gradients mine(100 * step + rank);
      group.reset_stats();
      hook(group, mine.bucket)();
      // On two ranks an all-reduce of N bytes sends N bytes. The factors have (20 + 12) · 2 and
      // (8 + 15) · 2 numbers; 7 + 4 numbers are exact.
      EXPECT_EQ(group.stats().all_reduce.bytes_sent, 4u * (step == 0 ? 371 : 64 + 46 + 11))
          << "step " << step;
    }
  });
}

TEST(PowerSgd, ConvergesToTheBestLowRankApproximationOfAConstantGradient) {
  const auto matrix = Gradients(1).bucket.gradients[0].clone();
  const auto singular = std::get<1>(at::linalg_svd(matrix, false));
  const double best = singular.narrow(0, 3, 9).norm().item<double>();
  PowerSgd power(
      {.rank = 3, .start_iteration = 0, .min_compression_rate = 0.1, .error_feedback = false});
  const auto hook = power.hook();
  ProcessGroup alone;
  double lost = 0;
  for (int step = 0; step < 200; ++step) {  // warm start: each call is one more power iteration
    Gradients mine(1);
    hook(alone, mine.bucket)();
    lost = (mine.bucket.gradients[0] - matrix).norm().item<double>();
    if (step == 0) EXPECT_GT(lost, 1.02 * best);
  }
  EXPECT_NEAR(lost, best, 1e-2 * best);
}

TEST(PowerSgd, WithErrorFeedbackNothingIsLostInTheLongRun) {
  for (int world = 1; world <= 4; ++world) {
    for (const bool feedback : {true, false}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        PowerSgd power({.rank = 1,
                        .start_iteration = 0,
                        .min_compression_rate = 0.1,
                        .error_feedback = feedback});
        const auto hook = power.hook();
        auto sent = at::zeros({371}), wanted = at::zeros({371});
        for (int step = 0; step < 60; ++step) {
          Gradients mine(rank);
          hook(group, mine.bucket)();
          sent += mine.bucket.flat;
          wanted += mean_of(0, world);
        }
        // Only the current errors, averaged over the ranks, are missing from the sum.
        if (feedback) {
          auto errors = at::zeros({371});
          const auto state = power.state_dict();
          errors.narrow(0, 0, 240).copy_(state.at("error.matrix").reshape({-1}));
          errors.narrow(0, 240, 120).copy_(state.at("error.kernel").reshape({-1}));
          errors.narrow(0, 367, 4).copy_(state.at("error.small").reshape({-1}));
          group.all_reduce(errors, 1.0 / world);
          EXPECT_TRUE(at::allclose(sent + errors, wanted, 1e-3, 1e-2)) << "world " << world;
          EXPECT_LT((sent - wanted).norm().item<double>(), 0.2 * wanted.norm().item<double>());
        } else {
          EXPECT_GT((sent - wanted).norm().item<double>(), 0.4 * wanted.norm().item<double>());
        }
      });
    }
  }
}

TEST(PowerSgd, ALoadedStateContinuesBitByBit) {
  for (const bool warm : {true, false}) {
    run_ranks(3, [&](ProcessGroup group, int rank) {
      const PowerSgdOptions options{
          .rank = 2, .start_iteration = 1, .min_compression_rate = 0.5, .warm_start = warm};
      PowerSgd first(options), second(options), forgetful(options);
      const auto run = [&](const PowerSgd& power, int from, int to) {
        at::Tensor last;
        for (int step = from; step < to; ++step) {
          Gradients mine(100 * step + rank);
          power.hook()(group, mine.bucket)();
          last = mine.bucket.flat;
        }
        return last;
      };
      run(first, 0, 4);
      const auto state = first.state_dict();
      EXPECT_EQ(state.at("iteration").item<int64_t>(), 4);
      EXPECT_EQ(state.count("q.matrix"), warm ? 1u : 0u);
      second.load_state_dict(state);
      run(forgetful, 0, 1);
      const auto a = run(first, 4, 7), b = run(second, 4, 7), c = run(forgetful, 4, 7);
      EXPECT_TRUE(at::equal(a, b));
      EXPECT_FALSE(at::equal(a, c));
    });
  }
  PowerSgd power;
  EXPECT_THROW(power.load_state_dict(
                   {{"iteration", at::scalar_tensor(1, at::kLong)}, {"momentum.x", at::ones({1})}}),
               UsageError);
  EXPECT_THROW(power.load_state_dict({}), UsageError);
}

TEST(PowerSgd, RecoversFromGradientsOfZeroAndInfinity) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    PowerSgd power({.rank = 2, .start_iteration = 0, .min_compression_rate = 0.5});
    const auto call = [&](const std::function<void(at::Tensor)>& change) {
      Gradients mine(rank);
      change(mine.bucket.flat);
      power.hook()(group, mine.bucket)();
      return mine.bucket.flat;
    };
    call([](at::Tensor flat) { flat.zero_(); });
    EXPECT_GT(call([](at::Tensor) {}).narrow(0, 0, 240).norm().item<double>(), 1);
    call([&](at::Tensor flat) {
      if (rank == 1) flat[5].fill_(std::numeric_limits<float>::infinity());
    });
    EXPECT_TRUE(call([](at::Tensor) {}).isfinite().all().item<bool>());
  });
}

TEST(PowerSgd, TrainsAsWellAsExactMeans) {
  for (int world = 1; world <= 4; ++world) {
    std::vector<double> losses(2);
    for (const bool compressed : {false, true}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<torch::nn::Sequential>(1, torch::nn::Linear(16, 32), torch::nn::Tanh(),
                                                 torch::nn::Linear(32, 16));
        PowerSgd power({.rank = 2, .start_iteration = 5, .min_compression_rate = 1});
        DistributedDataParallelOptions options{.first_bucket_mb = 1e-3, .bucket_cap_mb = 1e-3};
        if (compressed) options.comm_hook = power.hook();
        DistributedDataParallel ddp(net, group, options);
        torch::optim::SGD optimizer(net->parameters(), 0.3);
        const auto x = at::randn({24, 16}, at::make_generator<at::CPUGeneratorImpl>(3))
                           .narrow(0, 24 / world * rank, 24 / world);
        at::Tensor loss;
        for (int step = 0; step < 120; ++step) {
          optimizer.zero_grad();
          loss = (ddp(x) - torch::sin(x)).square().mean();
          loss.backward();
          optimizer.step();
        }
        for (const auto& parameter : net->parameters()) {
          auto sum = parameter.detach().clone();
          group.all_reduce(sum);
          EXPECT_TRUE(at::allclose(sum / world, parameter, 0, 1e-6))
              << "the ranks have different parameters";
        }
        loss = loss.detach();
        group.all_reduce(loss, 1.0 / world);
        if (rank == 0) losses[compressed] = loss.item<double>();
      });
    }
    EXPECT_LT(losses[1], 1.3 * losses[0] + 0.01) << "world " << world;
    EXPECT_LT(losses[0], 0.25);
  }
}

TEST(PowerSgd, RefusesOptionsOutOfRange) {
  EXPECT_THROW(PowerSgd({.rank = 0}), UsageError);
  EXPECT_THROW(PowerSgd({.start_iteration = -1}), UsageError);
  EXPECT_THROW(PowerSgd({.min_compression_rate = 0}), UsageError);
}

TEST(CommHooks, AUserDefinedHookGetsNamesAndShapesAndItsResultIsUsed) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1), plain = seeded<Uneven>(1);
    std::map<std::string, std::vector<int64_t>> seen;
    DistributedDataParallelOptions options{.bucket_cap_mb = 60.0 / (1 << 20)};
    options.comm_hook = [&seen](ProcessGroup& on,
                                const GradientBucket& bucket) -> std::function<void()> {
      for (size_t i = 0; i < bucket.names.size(); ++i)
        seen[bucket.names[i]] = bucket.gradients[i].sizes().vec();
      auto work = on.all_reduce_async(bucket.flat);
      return [work, flat = bucket.flat]() mutable {
        work.wait();
        flat.mul_(10);
      };
    };
    DistributedDataParallel ddp(net, group, options);
    ddp(torch::ones({2, 3})).sum().backward();
    plain(torch::ones({2, 3})).sum().backward();
    for (const auto& item : plain->named_parameters()) {
      EXPECT_EQ(seen[item.key()], item.value().sizes().vec());
      EXPECT_TRUE(at::allclose(net->named_parameters()[item.key()].grad(), 20 * item.value().grad(),
                               1e-5, 1e-6))
          << item.key();
    }
  });
}

}  // namespace
