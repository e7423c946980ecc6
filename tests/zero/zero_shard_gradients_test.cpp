#include <atomic>
#include <optional>

#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>

#include "harness/memory.h"
#include "tessera/detail/trainer_access.h"
#include "tessera/distributed_data_parallel.h"
#include "zero/zero_harness.h"

// Option shard_gradients: a bucket is reduced within backward and gives its memory back.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;

constexpr double kSmallBuckets = 40.0 / (1 << 20);  // 10 floats: several buckets

ZeroOptions sharded(Partition partition = Partition::flat) {
  ZeroOptions options;
  options.partition = partition;
  options.shard_gradients = true;
  options.bucket_cap_mb = kSmallBuckets;
  return options;
}

/// Runs `train(net, zero, rank)` with and without the option, and compares the weights.
template <class Net, class Train>
void expect_same_training(int world, const OptimizerFactory& optimizer, const ZeroOptions& options,
                          bool exact, const Train& train) {
  auto plain = options;
  plain.shard_gradients = false;
  run_ranks(world, [&](ProcessGroup group, int rank) {
    auto net = seeded<Net>(8), other = seeded<Net>(8);
    Zero ours(*net, group, optimizer, options), theirs(*other, group, optimizer, plain);
    train(net, ours, rank);
    train(other, theirs, rank);
    if (exact) expect_same_weights(net, other);
    else expect_close(copies(net->parameters()), copies(other->parameters()), "after training");
  });
}

TEST(ZeroShardGradients, TrainBitByBitAsWholeGradients) {
  const std::vector<OptimizerFactory> optimizers{
      factory("AdamW"), factory("SGD", {{"lr", 0.05}, {"momentum", 0.9}}),
      optimizer_factory<torch::optim::Adam>(torch::optim::AdamOptions(0.05))};
  for (const auto& optimizer : optimizers) {
    for (const auto partition : kPartitions) {
      for (const bool view : {true, false}) {
        for (int world = 1; world <= 4; ++world) {
          auto options = sharded(partition);
          options.parameters_as_bucket_view = view;
          expect_same_training<Uneven>(
              world, optimizer, options, true, [&](auto& net, Zero& zero, int rank) {
                for (int step = 0; step < 5; ++step) {
                  loss_of(net(rows(step, rank, world))).backward();
                  if (zero.options().shard_gradients) {
                    const auto parameters = net->parameters();
                    for (const auto& parameter : parameters)
                      EXPECT_EQ(static_cast<int64_t>(parameter.grad().storage().nbytes()),
                                parameter.element_size());
                    // Of one, because an error of libtorch has a backtrace, which is slow.
                    const auto& one = parameters[(step + world) % parameters.size()];
                    EXPECT_THROW(one.grad().template data_ptr<float>(), c10::Error) << "no memory";
                  }
                  zero.step();
                  zero.zero_grad();
                }
              });
        }
      }
    }
  }
}

TEST(ZeroShardGradients, TwoDtypesAndChannelsLast) {
  for (int world = 2; world <= 3; ++world) {
    expect_same_training<Mixed>(world, factory("AdamW"), sharded(), true,
                                [&](auto& net, Zero& zero, int rank) {
                                  for (int step = 0; step < 3; ++step) {
                                    loss_of(net(images(step, rank, world))).backward();
                                    zero.step();
                                    zero.zero_grad();
                                  }
                                });
  }
}

TEST(ZeroShardGradients, SeveralBackwardsAddUpWithAndWithoutNoSync) {
  for (const int held : {0, 1, 2}) {
    for (int world = 1; world <= 4; ++world) {
      expect_same_training<Uneven>(
          world, factory("SGD"), sharded(), false, [&](auto& net, Zero& zero, int rank) {
            for (int step = 0; step < 3; ++step) {
              for (int part = 0; part < 3; ++part) {
                std::optional<NoSync> scope;
                // The first ones, the last one, or none.
                if (held == 1 ? part < 2 : held == 2 && part == 2) scope.emplace(zero.no_sync());
                loss_of(net(rows(3 * step + part, rank, world))).backward();
              }
              zero.step();
              zero.zero_grad();
            }
          });
    }
  }
}

TEST(ZeroShardGradients, ClippingTakesTheMeanOfAllBackwards) {
  for (int world = 1; world <= 4; ++world) {
    expect_same_training<Uneven>(world, factory("SGD"), sharded(), false,
                                 [&](auto& net, Zero& zero, int rank) {
                                   tessera::zero::TrainerAccess::track_norm(zero, true);
                                   for (int step = 0; step < 3; ++step) {
                                     for (int part = 0; part < 2; ++part) {
                                       std::optional<NoSync> scope;
                                       if (!zero.options().shard_gradients && part == 0)
                                         scope.emplace(zero.no_sync());
                                       loss_of(net(rows(2 * step + part, rank, world))).backward();
                                     }
                                     const double before = zero.clip_grad_norm_(INFINITY);
                                     EXPECT_DOUBLE_EQ(zero.clip_grad_norm_(0.1), before);
                                     EXPECT_LE(zero.clip_grad_norm_(INFINITY), 0.1001);
                                     zero.clip_grad_value_(0.03);
                                     zero.step();
                                     EXPECT_GT(tessera::zero::TrainerAccess::last_norm(zero), 0);
                                     zero.zero_grad();
                                   }
                                 });
  }
}

TEST(ZeroShardGradients, AreTheGradientsOfShardsWhereTheyCanBeScaled) {
  for (const auto partition : kPartitions) {
    run_ranks(3, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(8), other = seeded<Uneven>(8);
      Zero zero(*net, group, factory("SGD"), sharded(partition));
      Zero plain(*other, group, factory("SGD"), {.partition = partition});
      (loss_of(net(rows(0, rank, 3))) * 1024).backward();
      for (const auto& shard : zero.shards()) {
        ASSERT_TRUE(shard.tensor.grad().defined()) << shard.parameter;
        shard.tensor.grad().mul_(1.0 / 1024);
      }
      loss_of(other(rows(0, rank, 3))).backward();
      zero.step();
      plain.step();
      expect_same_weights(net, other);
      for (const auto& shard : zero.shards()) EXPECT_TRUE(shard.tensor.grad().defined());
      zero.zero_grad();
      for (const auto& shard : zero.shards()) EXPECT_FALSE(shard.tensor.grad().defined());
    });
  }
}

TEST(ZeroShardGradients, OfAShardThatAreReplacedAreAnErrorOnEveryRank) {
  for (const bool replaces : {true, false}) {
    for (const auto& next : {"step", "backward", "zero_grad"}) {
      const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(8);
        Zero zero(*net, group, sgd(), sharded());
        const auto backward = [&] { loss_of(net(rows(0, rank, 2))).backward(); };
        backward();
        for (auto& shard : zero.shards())
          if (rank == 1)
            shard.tensor.mutable_grad() = replaces ? shard.tensor.grad() * 0 : at::Tensor();
        if (next == std::string("backward")) backward();
        for (const bool to_none : {false, true})
          if (next == std::string("zero_grad")) zero.zero_grad(to_none);
        if (next == std::string("zero_grad")) backward();
        zero.step();
      });
      if (next == std::string("zero_grad")) EXPECT_EQ(message_of(errors[0]), "");
      else expect_usage_errors(errors, replaces ? "was replaced" : "was cleared");
    }
  }
}

TEST(ZeroShardGradients, AreDroppedByZeroGrad) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8), other = seeded<Uneven>(8);
    Zero zero(*net, group, factory("SGD"), sharded()), plain(*other, group, factory("SGD"));
    loss_of(net(rows(7, rank, 2))).backward();
    zero.zero_grad();
    const auto before = copies(net->parameters());
    zero.step();  // there is no gradient
    expect_close(copies(net->parameters()), before, "after a step without gradients");
    for (int step = 0; step < 2; ++step) {
      loss_of(net(rows(step, rank, 2))).backward();
      zero.step();
      net->zero_grad();
      loss_of(other(rows(step, rank, 2))).backward();
      plain.step();
      plain.zero_grad();
    }
    expect_same_weights(net, other);
  });
}

/// `.grad` of the parameters stands for that of the shards.
TEST(ZeroShardGradients, TheModulesZeroGradClearsThem) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8), other = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"), sharded()), plain(*other, group, factory("AdamW"));
    for (int step = 0; step < 4; ++step) {
      for (auto& [trained, optimizer] :
           {std::pair<Uneven&, Zero&>(net, zero), std::pair<Uneven&, Zero&>(other, plain)}) {
        loss_of(trained(rows(9, rank, 2))).backward();
        if (step == 0) trained->zero_grad();
        if (step == 1) clear_gradients(trained->parameters());
        if (step == 2) trained->first->zero_grad();
        if (step == 1) loss_of(trained(rows(step, rank, 2))).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      expect_same_weights(net, other);
    }
  });
}

TEST(ZeroShardGradients, UseOfTheModulesGradientsIsAnError) {
  for (const int world : {1, 2}) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(8);
      Zero zero(*net, group, factory("SGD"), sharded());
      loss_of(net(rows(0, rank, world))).backward();
      const auto refused = [&](const std::function<void()>& use) {
        EXPECT_THAT(
            thrown_by([&] {
              const at::NoGradGuard no_grad;
              use();
            }),
            ::testing::AllOf(
                HasSubstr("rank " + std::to_string(rank)), HasSubstr("uses .grad of parameter"),
                HasSubstr("optimizer.clip_grad_norm_(…), optimizer.zero_grad(), or .grad() of")));
      };
      refused([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0); });
      refused([&] { torch::nn::utils::clip_grad_value_(net->parameters(), 1.0); });
      refused([&] { net->scale.grad().mul_(0.5); });
      EXPECT_EQ(zero.clip_grad_norm_(1e9), zero.clip_grad_norm_(INFINITY));
      refused([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0); });
      zero.step();
      zero.zero_grad();
      for (const auto& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
      group.barrier();
    });
  }
}

struct TwoWaysImpl : torch::nn::Module {
  TwoWaysImpl() {
    a = register_module("a", torch::nn::Linear(3, 5));
    b = register_module("b", torch::nn::Linear(3, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return (use_b ? b : a)(x); }
  torch::nn::Linear a{nullptr}, b{nullptr};
  bool use_b = false;
};
TORCH_MODULE(TwoWays);

TEST(ZeroShardGradients, ParametersThatNoRankUsedAreSkipped) {
  for (const int world : {1, 3}) {
    expect_same_training<TwoWays>(world, factory("AdamW"), sharded(), true,
                                  [&](auto& net, Zero& zero, int rank) {
                                    for (int step = 0; step < 6; ++step) {
                                      // Step by step: no rank, one rank, all ranks use b.
                                      net->use_b = step % 3 == 2 || (step % 3 == 1 && rank == 0);
                                      loss_of(net(rows(step, rank, world))).backward();
                                      zero.step();
                                      zero.zero_grad();
                                    }
                                  });
  }
}

TEST(ZeroShardGradients, SurviveAChangeOfRequiresGradAndNewGroups) {
  for (const bool clip : {false, true}) {
    expect_same_training<TwoWays>(
        2, factory("AdamW"), sharded(), true, [&](auto& net, Zero& zero, int rank) {
          for (int step = 0; step < 8; ++step) {
            if (step == 2) net->a->weight.requires_grad_(false);
            if (step == 5) net->a->weight.requires_grad_(true);
            loss_of(net->a(rows(step, rank, 2)) + net->b(rows(step, rank, 2))).backward();
            if (clip) zero.clip_grad_value_(0.02);
            zero.step();
            zero.zero_grad();
          }
        });
  }
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<TwoWays>(8), other = seeded<TwoWays>(8);
    const auto part = [](auto& from) { return named_parameters(*from); };
    Zero zero({{part(net->a), {}}}, group, factory("SGD"), sharded());
    Zero plain({{part(other->a), {}}}, group, factory("SGD"));
    loss_of(net->a(rows(0, rank, 2))).backward();
    NamedParameters late, late_plain;
    for (const auto& [name, tensor] : part(net->b)) late.emplace_back("late." + name, tensor);
    for (const auto& [name, tensor] : part(other->b))
      late_plain.emplace_back("late." + name, tensor);
    zero.add_param_group({late, {}});  // the gradients of the first group stay
    zero.step();
    loss_of(other->a(rows(0, rank, 2))).backward();
    plain.step();
    expect_same_weights(net, other);
    // The module clears those of the first group when a third one has been added.
    zero.add_param_group({{{"more", at::zeros({2}).set_requires_grad(true)}}, {}});
    const auto train = [&](auto& module, auto& optimizer) {
      module->zero_grad(/*set_to_none=*/false);
      loss_of(module->a(rows(1, rank, 2))).backward();
      optimizer.step();
    };
    train(net, zero);
    train(other, plain);
    expect_same_weights(net, other);
  });
}

TEST(ZeroShardGradients, JoinsRanksWithUnequalAmountsOfData) {
  for (const bool by_world : {true, false}) {
    expect_same_training<Uneven>(
        3, factory("AdamW"), sharded(), true, [&](auto& net, Zero& zero, int rank) {
          join({zero}, {.divide_by_initial_world_size = by_world}, [&](JoinLoop& loop) {
            for (int step = 0; step < 2 + rank; ++step) {
              loop.next();
              loss_of(net(own_rows(step, rank))).backward();
              zero.step();
              zero.zero_grad();
            }
          });
        });
  }
}

TEST(ZeroShardGradients, AClosureThatIsEvaluatedOftenSeesItsOwnGradients) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8), other = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"), sharded()), plain(*other, group, factory("AdamW"));
    for (auto& [trained, optimizer] :
         {std::pair<Uneven&, Zero&>(net, zero), std::pair<Uneven&, Zero&>(other, plain)})
      for (int step = 0; step < 3; ++step)
        optimizer.step([&, &model = trained, &own = optimizer] {
          own.zero_grad();
          auto loss = loss_of(model(rows(step, rank, 2)));
          loss.backward();
          return loss;
        });
    expect_same_weights(net, other);
  });
}

TEST(ZeroShardGradients, EachBackwardReducesEachBucketOnce) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"), sharded());
    const auto once = [&](bool hold) {
      std::optional<NoSync> scope;
      if (hold) scope.emplace(zero.no_sync());
      group.reset_stats();
      loss_of(net(rows(0, rank, 2))).backward();
      return group.stats();
    };
    const auto first = once(false), second = once(false), held = once(true);
    EXPECT_GT(first.reduce_scatter.calls, 1u) << "several buckets";
    EXPECT_EQ(first.calls(), first.reduce_scatter.calls + 1) << "and which parameters were used";
    EXPECT_EQ(second.reduce_scatter.calls, first.reduce_scatter.calls);
    EXPECT_EQ(second.reduce_scatter.bytes_sent, first.reduce_scatter.bytes_sent);
    EXPECT_EQ(held.calls(), 0u);
    EXPECT_EQ(zero.reductions().in_backward, 2 * static_cast<int64_t>(first.reduce_scatter.calls));
    zero.step();  // reduces what was held back
    EXPECT_EQ(zero.reductions().in_step, static_cast<int64_t>(first.reduce_scatter.calls));
  });
}

TEST(ZeroShardGradients, RefusesOptionsThatDoNotGoWithIt) {
  const auto message = [](ZeroOptions options, const OptimizerFactory& optimizer) {
    options.shard_gradients = true;
    return thrown_by([&] {
      auto net = seeded<Uneven>(8);
      Zero zero(*net, ProcessGroup(), optimizer, options);
    });
  };
  const auto adamw = factory("AdamW");
  EXPECT_THAT(message({.reduce_gradients = false}, adamw),
              HasSubstr("rank 0: option shard_gradients needs reduce_gradients"));
  auto reduced = seeded<Uneven>(8);
  DistributedDataParallel ddp(reduced, ProcessGroup());
  EXPECT_THAT(thrown_by([&] {
                Zero zero(*reduced, ProcessGroup(), adamw, ZeroOptions{.shard_gradients = true});
              }),
              HasSubstr("option shard_gradients excludes DistributedDataParallel"));
  EXPECT_THAT(message({.partition = Partition::whole},
                      optimizer_factory<torch::optim::LBFGS>(torch::optim::LBFGSOptions())),
              HasSubstr("does not use all parameters at once"));
}

TEST(ZeroShardGradients, AGradientThatNoBackwardHasReducedIsAnErrorOnEveryRank) {
  const auto errors = run_ranks_catching(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"), sharded());
    loss_of(net(rows(0, rank, 2))).backward();
    if (rank == 1) net->scale.mutable_grad() = at::ones({1});
    zero.step();
  });
  expect_usage_errors(errors, "rank 1: shard_gradients: parameter scale has a gradient that no");
}

// Memory. All ranks are threads of this process, whose pages count once (PSS).

[[maybe_unused]] const bool kFreedIsReturned = return_freed_blocks();
constexpr int64_t kLayers = 24, kLayer = 4 * kMiB, kRanks = 2;

struct DeepImpl : torch::nn::Module {
  DeepImpl() {
    for (int64_t i = 0; i < kLayers; ++i) {
      layers.push_back(
          register_module("l" + std::to_string(i),
                          torch::nn::Linear(torch::nn::LinearOptions(1024, 1024).bias(false))));
    }
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Deep);

/// The most memory that gradients take in two steps of two backwards.
int64_t gradient_peak(bool shard) {
  std::atomic<int64_t> peak = 0;
  run_ranks(kRanks, [&](ProcessGroup group, int rank) {
    auto net = seeded<Deep>(1);
    static int64_t before;
    group.barrier();
    if (rank == 0) {
      ::malloc_trim(0);
      before = proportional_bytes();
    }
    group.barrier();
    ZeroOptions options;
    options.shard_gradients = shard;
    options.bucket_cap_mb = 8;
    Zero zero(*net, group, factory("SGD"), options);
    const auto look = [&](const at::Tensor&) {
      if (rank == 0) peak = std::max<int64_t>(peak, proportional_bytes() - before);
    };
    for (int backward = 0; backward < 4; ++backward) {
      auto x = at::ones({2, 1024}).requires_grad_();
      for (size_t i = 0; i < net->layers.size(); ++i) {
        x = torch::tanh(net->layers[i](x));
        if (i % 3 == 1) x.register_hook(look);
      }
      x.square().mean().backward();
      look({});
      if (backward % 2 == 1) {
        zero.step();
        zero.zero_grad();
      }
    }
    EXPECT_GT(zero.memory().gradients, 0);
  });
  return peak;
}

TEST(ZeroShardGradients, TakeOwnShardAndTwoBuckets) {
  constexpr int64_t kGradients = kLayers * kLayer, kBucket = 8 * kMiB;
  // The shards of all ranks are the gradients once. Beside them are activations, and gradients that
  // autograd has computed elsewhere in the first backward.
  constexpr int64_t kFormula = kGradients + kRanks * 2 * kBucket, kRest = 16 * kMiB;
  const auto whole = gradient_peak(false), shards = gradient_peak(true);
  std::printf("peak %ld MiB, formula %ld MiB, with whole gradients %ld MiB\n", shards / kMiB,
              kFormula / kMiB, whole / kMiB);
  EXPECT_LE(shards, kFormula + kRest);
  EXPECT_GT(whole, kFormula + kRest) << "the test can fail";
}

/// The gradient of a parameter that has just become trainable is not among those of shards().
TEST(ZeroShardGradients, ChangedInTheFirstStepOfAParameterThatThawsAreAnError) {
  for (const int world : {1, 3}) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(8);
      net->last->weight.requires_grad_(false);
      Zero zero(*net, group, factory("AdamW"), sharded());
      const auto shards = zero.shards();
      const auto halve = [&] {
        for (auto& shard : shards)
          if (shard.tensor.grad().defined()) shard.tensor.mutable_grad().mul_(0.5);
      };
      const auto backward = [&](int step) {
        zero.zero_grad();
        loss_of(net(rows(step, rank, world))).backward();
      };
      backward(0);
      halve();
      zero.step();
      net->last->weight.requires_grad_(true);
      zero.shards();
      backward(1);
      EXPECT_THAT(thrown_by([&] { zero.shards(); }),
                  HasSubstr("shards(): the gradient of parameter last.weight"));
      halve();
      EXPECT_THAT(thrown_by([&] { zero.step(); }),
                  HasSubstr("the gradients of shards() were changed, and parameter last.weight"));
    });
  }
}

TEST(ZeroShardGradients, OfAParameterThatThawsAreClippedWithTheOthers) {
  expect_same_training<Uneven>(3, factory("AdamW"), sharded(), false,
                               [](auto& net, Zero& zero, int rank) {
                                 net->last->weight.requires_grad_(false);
                                 for (int step = 0; step < 3; ++step) {
                                   net->last->weight.requires_grad_(step > 0);
                                   zero.zero_grad();
                                   loss_of(net(rows(step, rank, 3))).backward();
                                   zero.clip_grad_norm_(0.1);
                                   zero.step();
                                 }
                               });
}

}  // namespace
