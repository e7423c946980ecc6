#include <limits>

#include <torch/nn/utils/clip_grad.h>

#include "zero/zero_harness.h"

// Clipping by value, alone and with the norm, and dynamic loss scaling from outside.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;

struct Clipping {
  bool norm_first, value, norm_last;
};

TEST(ZeroClipNorm, TheTensorHasTheValueAndTheGradientsTheBits) {
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto one = seeded<Uneven>(8), other = seeded<Uneven>(8);
      Zero zero(*one, group, factory("SGD")), same(*other, group, factory("SGD"));
      for (const double p : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
        for (const auto& [net, optimizer] : {std::pair(one, &zero), std::pair(other, &same)}) {
          optimizer->zero_grad();
          loss_of(Uneven(net)(rows(0, rank, world))).backward();
        }
        const double norm = zero.clip_grad_norm_(0.1, p);
        EXPECT_EQ(same.clip_grad_norm_(0.1, p).tensor().item<double>(), norm) << p;
        EXPECT_EQ(same.clip_grad_norm_(INFINITY, p), zero.clip_grad_norm_(INFINITY, p)) << p;
        zero.step();
        same.step();
      }
      for (size_t i = 0; i < one->parameters().size(); ++i)
        EXPECT_TRUE(at::equal(one->parameters()[i], other->parameters()[i])) << i;
      EXPECT_THAT(thrown_by([&] { zero.clip_grad_norm_(-1); }), HasSubstr("max_norm is -1"));
    });
  }
}

TEST(ZeroClipValue, EqualsThePlainOneAloneAndWithTheNorm) {
  constexpr double kNorm = 0.1, kValue = 0.01;
  for (const auto clipping :
       {Clipping{false, true, false}, Clipping{true, true, false}, Clipping{false, true, true}}) {
    auto plain = seeded<Uneven>(8);
    const auto reference = factory("SGD")({torch::optim::OptimizerParamGroup(plain->parameters())});
    double expected = 0;
    for (int step = 0; step < 3; ++step) {
      reference->zero_grad();
      (loss_of(plain(rows(2 * step))) + loss_of(plain(rows(2 * step + 1)))).backward();
      if (clipping.norm_first) torch::nn::utils::clip_grad_norm_(plain->parameters(), kNorm);
      if (clipping.value) torch::nn::utils::clip_grad_value_(plain->parameters(), kValue);
      if (clipping.norm_last)
        expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), kNorm / 10);
      reference->step();
    }
    for (const auto partition : kPartitions) {
      for (int world = 1; world <= 4; ++world) {
        run_ranks(world, [&](ProcessGroup group, int rank) {
          auto net = seeded<Uneven>(8);
          Zero zero(*net, group, factory("SGD"), {.partition = partition});
          double norm = 0;
          for (int step = 0; step < 3; ++step) {
            {
              auto scope = zero.no_sync();
              loss_of(net(rows(2 * step, rank, world))).backward();
            }
            loss_of(net(rows(2 * step + 1, rank, world))).backward();
            const auto before = group.stats().calls();
            if (clipping.norm_first) zero.clip_grad_norm_(kNorm);
            if (clipping.value) zero.clip_grad_value_(kValue);
            if (clipping.norm_last) norm = zero.clip_grad_norm_(kNorm / 10);
            zero.step();
            zero.zero_grad();
            if (world > 1)
              EXPECT_EQ(group.stats().calls() - before,
                        3u + clipping.norm_first + clipping.norm_last)
                  << "flags, reduction, gather; one a norm";
          }
          if (clipping.norm_last) EXPECT_NEAR(norm, expected, 1e-5 * expected);
          for (size_t i = 0; i < net->parameters().size(); ++i)
            EXPECT_TRUE(at::allclose(net->parameters()[i], plain->parameters()[i], 1e-5, 1e-6))
                << "world " << world;
        });
      }
    }
  }
}

TEST(ZeroClipValue, ItsOwnTrafficIsTheReduction) {
  for (int world = 2; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(8);
      Zero zero(*net, group, factory("AdamW"));
      loss_of(net(rows(0, rank, world))).backward();
      const auto own = net->last->weight.grad().clone();
      group.reset_stats();
      zero.clip_grad_value_(0.001);
      EXPECT_EQ(group.stats().reduce_scatter.calls, 1u);
      EXPECT_EQ(group.stats().all_reduce.calls, 1u) << "who used what";
      EXPECT_EQ(group.stats().calls(), 2u);
      zero.clip_grad_value_(0.0005);
      EXPECT_EQ(group.stats().calls(), 2u) << "it is reduced already";
      EXPECT_TRUE(at::equal(net->last->weight.grad(), own)) << ".grad stays this rank's own";
      zero.step();
      EXPECT_EQ(group.stats().all_gather.calls, 1u);
      EXPECT_EQ(group.stats().calls(), 3u);
    });
  }
}

TEST(ZeroClipValue, OfGradientsThatTheCallerReduced) {
  expect_callers_reduction_is_as_good<Mixed>(images,
                                             [](Zero& zero) { zero.clip_grad_value_(0.002); });
}

/// `net->zero_grad()` in place of a step, as after a norm that is not finite.
void leave_out_steps(Uneven& net, torch::optim::Optimizer& optimizer, bool set_to_none) {
  for (int step = 0; step < 5; ++step) {
    loss_of(net(rows(step))).backward();
    if (auto* const zero = dynamic_cast<Zero*>(&optimizer)) zero->clip_grad_norm_(0.1);
    else torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1);
    if (step % 2 == 1) optimizer.step();
    net->zero_grad(set_to_none);
  }
}

TEST(ZeroClipping, TheModulesZeroGradGivesTheMeanUp) {
  const std::vector<ZeroOptions> modes{{},
                                       {.parameters_as_bucket_view = false},
                                       {.reduce_gradients = false},
                                       {.overlap = Overlap::none},
                                       {.overlap = Overlap::background},
                                       {.shard_gradients = true}};
  const auto sgd = factory("SGD", {{"lr", 0.1}, {"momentum", 0.9}, {"weight_decay", 0.05}});
  for (const bool set_to_none : {true, false}) {
    auto plain = seeded<Uneven>(8);
    const auto reference = sgd({torch::optim::OptimizerParamGroup(plain->parameters())});
    leave_out_steps(plain, *reference, set_to_none);
    for (const auto& hosts : std::vector<std::vector<int>>{{0}, {0, 0}, {0, 0, 0}, {0, 1}}) {
      for (size_t mode = 0; mode < modes.size(); ++mode) {
        run_ranks_on(hosts, [&](ProcessGroup group, int) {
          auto net = seeded<Uneven>(8);
          Zero zero(*net, group, sgd, modes[mode]);
          leave_out_steps(net, zero, set_to_none);
          zero.wait();
          expect_close(copies(net->parameters()), copies(plain->parameters()),
                       "mode " + std::to_string(mode));
        });
      }
    }
  }
}

TEST(ZeroClipping, AGradientThatChangesBetweenItAndStepIsAnError) {
  for (const bool reduce : {true, false}) {
    const auto errors_of = [&](void (*change)(Uneven & net, int rank)) {
      return run_ranks_catching(2, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(8);
        Zero zero(*net, group, factory("SGD"), {.reduce_gradients = reduce});
        loss_of(net(rows(0))).backward();
        zero.clip_grad_norm_(0.1);
        change(net, rank);
        zero.step();
      });
    };
    expect_usage_errors(errors_of([](Uneven& net, int rank) {
                          if (rank == 1) net->last->weight.mutable_grad().mul_(2);
                        }),
                        "rank 1: .grad of parameter last.weight was changed between clipping");
    expect_usage_errors(errors_of([](Uneven& net, int) { loss_of(net(rows(1))).backward(); }),
                        "a backward came between clipping (or grad_norm) and step()");
  }
}

TEST(ZeroClipValue, MisuseIsRefused) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("SGD"));
    loss_of(net(rows(0, rank, 2))).backward();
    EXPECT_THAT(thrown_by([&] { zero.clip_grad_value_(-1); }),
                HasSubstr("clip_value is -1; expected 0 or more"));
    EXPECT_THAT(thrown_by([&] { zero.clip_grad_value_(std::numeric_limits<double>::quiet_NaN()); }),
                HasSubstr("clip_value is nan"));
    zero.clip_grad_value_(1.0);
    loss_of(net(rows(1, rank, 2))).backward();
    EXPECT_THAT(thrown_by([&] { zero.step(); }), HasSubstr("a backward came between clipping"));
    zero.zero_grad();
    loss_of(net(rows(1, rank, 2))).backward();
    zero.step();
  });
}

/// As ZeroRedundancyOptimizer's comment says: unscale `.grad`, agree, step or not.
TEST(ZeroLossScaling, NeedsNoMoreThanTheGradients) {
  for (const auto partition : kPartitions) {
    run_ranks(3, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(8), other = seeded<Uneven>(8);
      Zero plain(*net, group, factory("AdamW"), {.partition = partition}),
          scaled(*other, group, factory("AdamW"), {.partition = partition});
      for (int step = 0; step < 4; ++step) {
        const bool overflows = step == 1;
        const double scale = 1024;
        {
          auto scope = scaled.no_sync();
          (loss_of(other(rows(2 * step, rank, 3))) * scale).backward();
        }
        (loss_of(other(rows(2 * step + 1, rank, 3))) * scale).backward();
        if (overflows && rank == 2)
          other->last->bias.mutable_grad()[0] = std::numeric_limits<float>::infinity();
        auto infinite = at::zeros({1});
        for (auto& p : other->parameters()) {
          p.mutable_grad().mul_(1 / scale);
          if (!at::isfinite(p.grad()).all().item<bool>()) infinite += 1;
        }
        group.all_reduce(infinite);
        EXPECT_EQ(infinite.item<float>() > 0, overflows);
        if (overflows) {
          scaled.zero_grad();
          continue;
        }
        scaled.clip_grad_norm_(0.5);
        scaled.step();
        scaled.zero_grad();
        loss_of(net(rows(2 * step, rank, 3))).backward();
        loss_of(net(rows(2 * step + 1, rank, 3))).backward();
        plain.clip_grad_norm_(0.5);
        plain.step();
        plain.zero_grad();
      }
      expect_same_weights(net, other);
    });
  }
}

}  // namespace
