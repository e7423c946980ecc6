// The module's own parameters under FSDP: zero_grad() of the module, and optimizers and clipping
// over net->parameters().

#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/fully_sharded_data_parallel.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Options = FullyShardedDataParallelOptions;

Options with_strategy(ShardingStrategy strategy) {
  auto options = every_leaf();
  options.sharding_strategy = strategy;
  return options;
}

/// One rank computes what libtorch does, bit by bit; several ranks sum in another order.
template <class Net>
void expect_weights(FullyShardedDataParallel<Net>& fsdp, const Net& plain, int world,
                    const std::string& where) {
  const auto weights = plain->named_parameters();
  for (const auto& [name, value] : fsdp.state_dict(-1)) {
    const auto& expected = weights[name];
    EXPECT_TRUE(world == 1 ? at::equal(value, expected) : at::allclose(value, expected, 1e-4, 1e-6))
        << where << ", world " << world << ", " << name;
  }
}

/// The training step of libtorch's DCGAN example: the discriminator's gradients of the generator's
/// backward are cleared by the discriminator's next zero_grad().
template <class D, class G, class OnD, class OnG>
void gan_step(D& d, G& g, OnD&& on_d, OnG&& on_g, torch::optim::Optimizer& d_optimizer,
              torch::optim::Optimizer& g_optimizer, const at::Tensor& real,
              const at::Tensor& noise) {
  d->zero_grad();
  loss_of(on_d(real)).backward();
  const auto fake = on_g(noise);
  (on_d(fake.detach()) + 1).square().mean().backward();
  d_optimizer.step();
  g->zero_grad();
  loss_of(on_d(fake)).backward();
  g_optimizer.step();
}

struct GeneratorImpl : torch::nn::Module {
  GeneratorImpl()
      : first(register_module("first", torch::nn::Linear(3, 5))),
        last(register_module("last", torch::nn::Linear(5, 3))) {}
  torch::Tensor forward(torch::Tensor x) { return last(torch::tanh(first(x))); }
  torch::nn::Linear first, last;
};
TORCH_MODULE(Generator);

TEST(FsdpOwnParameters, TheDcganLoopTrainsAsInLibtorch) {
  for (int world = 1; world <= 3; ++world) {
    for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto d = seeded<Chain>(1, 2), plain_d = seeded<Chain>(1, 2);
        auto g = seeded<Generator>(2), plain_g = seeded<Generator>(2);
        FullyShardedDataParallel fsdp_d(d, group, with_strategy(strategy));
        FullyShardedDataParallel fsdp_g(g, group, with_strategy(strategy));
        const auto d_optimizer = adamw(fsdp_d.parameters()),
                   g_optimizer = adamw(fsdp_g.parameters());
        const auto other_d = adamw(plain_d->parameters()), other_g = adamw(plain_g->parameters());
        for (int i = 0; i < 4; ++i) {
          gan_step(d, g, fsdp_d, fsdp_g, *d_optimizer, *g_optimizer, rows(i, rank, world),
                   rows(50 + i, rank, world));
          gan_step(plain_d, plain_g, plain_d, plain_g, *other_d, *other_g, rows(i), rows(50 + i));
        }
        expect_weights(fsdp_d, plain_d, world, "discriminator");
        expect_weights(fsdp_g, plain_g, world, "generator");
      });
    }
  }
}

enum class Place { before_forward, before_backward, after_step };

/// `steps` steps with two backwards each, and zero_grad() of the module at `place`.
template <class Net, class Forward, class Rows>
void accumulate(Net& net, Forward& forward, torch::optim::Optimizer& optimizer, Place place,
                bool set_to_none, Rows&& rows_of) {
  for (int i = 0; i < 6; i += 2) {
    if (place == Place::before_forward) net->zero_grad(set_to_none);
    const auto first = loss_of(forward(rows_of(i)));
    if (place == Place::before_backward) net->zero_grad(set_to_none);
    first.backward();
    loss_of(forward(rows_of(i + 1))).backward();
    optimizer.step();
    if (place == Place::after_step) net->zero_grad(set_to_none);
  }
}

TEST(FsdpOwnParameters, ZeroGradOfTheModuleClearsTheShardsWhereverItIsCalled) {
  for (int world = 1; world <= 3; ++world) {
    for (const auto place : {Place::before_forward, Place::before_backward, Place::after_step}) {
      for (const bool set_to_none : {false, true}) {
        run_ranks(world, [&](ProcessGroup group, int rank) {
          auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
          FullyShardedDataParallel fsdp(net, group, every_leaf());
          const auto optimizer = adamw(fsdp.parameters()), other = adamw(plain->parameters());
          accumulate(net, fsdp, *optimizer, place, set_to_none,
                     [&](int i) { return rows(i, rank, world); });
          accumulate(plain, plain, *other, place, set_to_none, [](int i) { return rows(i); });
          expect_weights(fsdp, plain, world,
                         "place " + std::to_string(static_cast<int>(place)) +
                             (set_to_none ? ", to none" : ", to zero"));
        });
      }
    }
  }
}

TEST(FsdpOwnParameters, AParameterWithoutAGradientIsNotUpdatedWithAnOldOne) {
  for (int world = 1; world <= 2; ++world) {
    for (const bool set_to_none : {false, true}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Skipping>(1), plain = seeded<Skipping>(1);
        FullyShardedDataParallel fsdp(net, group, every_leaf());
        const auto optimizer = adamw(fsdp.parameters()), other = adamw(plain->parameters());
        for (int i = 0; i < 4; ++i) {
          net->zero_grad(set_to_none);
          loss_of(fsdp(rows(i, rank, world))).backward();
          optimizer->step();
          plain->zero_grad(set_to_none);
          loss_of(plain(rows(i))).backward();
          other->step();
        }
        expect_weights(fsdp, plain, world, set_to_none ? "to none" : "to zero");
      });
    }
  }
}

TEST(FsdpOwnParameters, ZeroGradOfTheModuleDropsWhatNoSyncHasAccumulated) {
  for (const bool set_to_none : {false, true}) {
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      torch::optim::SGD optimizer(fsdp.parameters(), 0.1), other(plain->parameters(), 0.1);
      const auto accumulate_locally = [&](int i) {
        const auto local = fsdp.no_sync();
        loss_of(fsdp(rows(i, rank, 2))).backward();
      };
      accumulate_locally(0);
      net->zero_grad(set_to_none);
      accumulate_locally(1);
      loss_of(fsdp(rows(2, rank, 2))).backward();
      optimizer.step();
      for (int i = 1; i < 3; ++i) loss_of(plain(rows(i))).backward();
      other.step();
      expect_weights(fsdp, plain, 2, set_to_none ? "to none" : "to zero");
      EXPECT_EQ(fsdp.stats().gradient_bytes, 0);
    });
  }
}

TEST(FsdpOwnParameters, ABackwardThatThrowsLeavesWhatZeroGradClears) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    torch::optim::SGD optimizer(fsdp.parameters(), 0.1), other(plain->parameters(), 0.1);
    loss_of(fsdp(rows(0, rank, 2))).backward();
    auto x = rows(1, rank, 2).set_requires_grad(true);
    x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
    EXPECT_THROW(loss_of(fsdp(x)).backward(), std::runtime_error);
    net->zero_grad(true);
    loss_of(fsdp(rows(2, rank, 2))).backward();
    optimizer.step();
    loss_of(plain(rows(2))).backward();
    other.step();
    expect_weights(fsdp, plain, 2, "after the error");
  });
}

TEST(FsdpOwnParameters, NormsAndClippingSeeWhatTheModuleHasCleared) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    for (const bool set_to_none : {false, true}) {
      loss_of(fsdp(rows(0, rank, 2))).backward();
      EXPECT_GT(fsdp.clip_grad_norm_(INFINITY), 0);
      net->zero_grad(set_to_none);
      EXPECT_EQ(fsdp.clip_grad_norm_(1), 0);
      for (const auto& shard : fsdp.parameters()) EXPECT_EQ(shard.grad().defined(), !set_to_none);
    }
    loss_of(fsdp(rows(0, rank, 2))).backward();
    fsdp.zero_grad();
    for (const auto& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
  });
}

/// Runs `wrong_line(net)` after a backward in each world and strategy; it must name a parameter and
/// the right call.
template <class WrongLine>
void expect_refused(WrongLine&& wrong_line, const std::string& right_call) {
  for (int world = 1; world <= 3; ++world) {
    for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Chain>(1);
        FullyShardedDataParallel fsdp(net, group, with_strategy(strategy));
        loss_of(fsdp(rows(0, rank, world))).backward();
        EXPECT_THAT(thrown_by([&] { wrong_line(net); }),
                    AllOf(HasSubstr("FullyShardedDataParallel: rank " + std::to_string(rank)),
                          HasSubstr("parameter list.0.weight"), HasSubstr(right_call)))
            << "world " << world;
      });
    }
  }
}

template <class Optimizer, class OptimizerOptions>
void expect_optimizer_refused(const OptimizerOptions& options) {
  expect_refused(
      [&](Chain& net) {
        Optimizer optimizer(net->parameters(), options);
        optimizer.step();
      },
      "fsdp.parameters()");
}

TEST(FsdpOwnParameters, AnOptimizerOverThemIsRefusedAtItsStep) {
  expect_optimizer_refused<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1));
  expect_optimizer_refused<torch::optim::Adam>(torch::optim::AdamOptions(0.1));
  expect_optimizer_refused<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
  expect_optimizer_refused<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
  expect_optimizer_refused<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.1));
  expect_refused([](Chain& net) { adamw(net->parameters())->step(); }, "fsdp.parameters()");
}

TEST(FsdpOwnParameters, ClippingAndReadingTheirGradientsIsRefused) {
  for (const double p : {2.0, 1.0, 0.0, std::numeric_limits<double>::infinity()}) {
    expect_refused([&](Chain& net) { torch::nn::utils::clip_grad_norm_(net->parameters(), 1, p); },
                   "fsdp.clip_grad_norm_(");
  }
  expect_refused([](Chain& net) { torch::nn::utils::clip_grad_value_(net->parameters(), 1); },
                 "aten::clamp_ uses .grad of parameter");
  expect_refused([](Chain& net) { (net->parameters()[0].grad() * 2).sum(); },
                 ".grad() of fsdp.named_parameters()");
}

TEST(FsdpOwnParameters, TheirGradientsTakeNoMemory) {
  auto net = seeded<Chain>(1);
  FullyShardedDataParallel fsdp(net, ProcessGroup(), every_leaf());
  loss_of(fsdp(rows(0))).backward();
  for (const auto& parameter : net->parameters()) {
    EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
    EXPECT_EQ(parameter.grad().storage().nbytes(), sizeof(float));
  }
}

TEST(FsdpOwnParameters, TheModuleHasNoPlaceholdersAfterItsWrapper) {
  auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
  {
    FullyShardedDataParallel fsdp(net, ProcessGroup(), every_leaf());
    loss_of(fsdp(rows(0))).backward();
  }
  loss_of(net(rows(1))).backward();
  loss_of(plain(rows(1))).backward();
  for (size_t i = 0; i < plain->parameters().size(); ++i)
    EXPECT_TRUE(at::equal(net->parameters()[i].grad(), plain->parameters()[i].grad())) << i;
}

TEST(FsdpShardNorms, TheTensorHasTheValueAndTheGradientsTheBits) {
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto one = seeded<Chain>(1), other = seeded<Chain>(1);
      FullyShardedDataParallel fsdp(one, group, every_leaf()), same(other, group, every_leaf());
      for (const double p : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
        for (auto* model : {&fsdp, &same}) {
          model->zero_grad();
          loss_of((*model)(rows(0, rank, world))).backward();
        }
        const double norm = fsdp.clip_grad_norm_(1e-3, p);
        EXPECT_EQ(same.clip_grad_norm_(1e-3, p).tensor().item<double>(), norm) << p;
        EXPECT_EQ(same.clip_grad_norm_(INFINITY, p), fsdp.clip_grad_norm_(INFINITY, p)) << p;
        for (size_t i = 0; i < fsdp.parameters().size(); ++i)
          EXPECT_TRUE(at::equal(fsdp.parameters()[i].grad(), same.parameters()[i].grad())) << i;
      }
      EXPECT_THAT(thrown_by([&] { fsdp.clip_grad_norm_(-1); }), HasSubstr("max_norm is -1"));
    });
  }
}

TEST(FsdpShardNorms, ClippingByTheNormOfOneRankIsRefused) {
  for (int world = 2; world <= 4; ++world) {
    for (const double p : {2.0, 1.0}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Chain>(1);
        FullyShardedDataParallel fsdp(net, group, every_leaf());
        for (int i = 0; i < 2; ++i) {
          fsdp.zero_grad();
          loss_of(fsdp(rows(i, rank, world))).backward();
          const double norm = fsdp.clip_grad_norm_(INFINITY);
          // Logging all norms is allowed.
          for (const auto& shard : fsdp.parameters())
            EXPECT_GE(shard.grad().norm().item<float>(), 0);
          EXPECT_THAT(
              thrown_by([&] { torch::nn::utils::clip_grad_norm_(fsdp.parameters(), 1e-3, p); }),
              AllOf(HasSubstr("FullyShardedDataParallel: rank " + std::to_string(rank)),
                    HasSubstr("expected fsdp.clip_grad_norm_(")));
          EXPECT_EQ(fsdp.clip_grad_norm_(INFINITY), norm);  // nothing was scaled
          torch::nn::utils::clip_grad_value_(fsdp.parameters(), 1e-3);
          fsdp.clip_grad_norm_(1e-4);
          EXPECT_NEAR(fsdp.clip_grad_norm_(INFINITY), 1e-4, 1e-6);
        }
      });
    }
  }
}

TEST(FsdpShardNorms, ClippingByTheInfinityNormOfOneRankIsRefused) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, {.partition = Partition::flat});
    loss_of(fsdp(rows(0, rank, 2))).backward();
    std::vector<at::Tensor> not_empty;  // libtorch has no maximum of an empty gradient
    for (auto& shard : fsdp.parameters())
      if (shard.numel() > 0) not_empty.push_back(shard);
      else shard.mutable_grad() = at::Tensor();
    EXPECT_THAT(thrown_by([&] {
                  torch::nn::utils::clip_grad_norm_(not_empty, 1,
                                                    std::numeric_limits<double>::infinity());
                }),
                HasSubstr("expected fsdp.clip_grad_norm_("));
  });
}

TEST(FsdpShardNorms, ANormAndAnUpdateForEachParameterIsAllowed) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    loss_of(fsdp(rows(0, rank, 2))).backward();
    for (int round = 0; round < 2; ++round)
      for (const auto& shard : fsdp.parameters()) shard.grad().mul_(1 / (shard.grad().norm() + 1));
    for (const auto& shard : fsdp.parameters()) shard.grad().norm();
    for (const auto& shard : fsdp.parameters()) shard.grad().mul_(0.5);  // a loss scale
  });
}

TEST(FsdpShardNorms, OneRankMayClipItsOwnGradients) {
  auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
  FullyShardedDataParallel fsdp(net, ProcessGroup(), every_leaf());
  loss_of(fsdp(rows(0))).backward();
  loss_of(plain(rows(0))).backward();
  EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(fsdp.parameters(), 1e-3),
              torch::nn::utils::clip_grad_norm_(plain->parameters(), 1e-3), 1e-6);
}

}  // namespace
