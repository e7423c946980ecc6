#include <array>

#include <torch/optim/adam.h>

#include "zero/zero_harness.h"

// Overlap::backward between hosts: buckets are reduced while backward computes the next ones.

namespace {

using namespace tessera;
using namespace tessera::testing;

using Hosts = std::vector<int>;

ZeroOptions early(bool value, Partition partition = Partition::flat) {
  return {.partition = partition,
          .overlap = value ? Overlap::backward : Overlap::none,
          .bucket_cap_mb = 0.0002};
}

std::vector<OptimizerFactory> optimizers() {
  return {factory("AdamW"), optimizer_factory<torch::optim::Adam>(torch::optim::AdamOptions(0.05))};
}

/// What a loop does between two steps, the same to both optimizers.
using Round = std::function<void(Uneven& net, Zero& zero, int step, int rank, int world)>;

/// Trains twice, with and without reductions in backward: the weights have the same bits.
/// `expect`: looks at the optimizer that reduces early.
void expect_same_training(const Hosts& hosts, const OptimizerFactory& optimizer,
                          Partition partition, const Round& round,
                          const std::function<void(const Zero&)>& expect) {
  const int world = static_cast<int>(hosts.size());
  run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8), other = seeded<Uneven>(8);
    Zero sooner(*net, group, optimizer, early(true, partition));
    Zero later(*other, group, optimizer, early(false, partition));
    for (int step = 0; step < 5; ++step) {
      round(net, sooner, step, rank, world);
      sooner.step();
      sooner.zero_grad();
      round(other, later, step, rank, world);
      later.step();
      later.zero_grad();
    }
    expect_same_weights(net, other);
    EXPECT_EQ(later.reductions().in_backward, 0);
    expect(sooner);
  });
}

void backward(Uneven& net, int batch, int rank, int world) {
  loss_of(net(rows(batch, rank, world))).backward();
}

const std::array<Hosts, 4> kPlacements{Hosts{0, 1}, {0, 0, 1}, {0, 1, 0, 1}, {0, 1, 2, 3}};

TEST(ZeroEarly, TrainsBitByBitAsWithReductionsInStep) {
  for (const auto& hosts : kPlacements) {
    for (const auto& optimizer : optimizers()) {
      for (const auto partition : kPartitions) {
        expect_same_training(
            hosts, optimizer, partition,
            [](Uneven& net, Zero& zero, int step, int rank, int world) {
              {
                const auto scope = zero.no_sync();
                backward(net, 2 * step, rank, world);
              }
              backward(net, 2 * step + 1, rank, world);
              if (step % 2 == 0) zero.clip_grad_norm_(0.1);
              if (step % 3 == 0) zero.clip_grad_value_(0.01);
            },
            [](const Zero& zero) {
              EXPECT_GT(zero.reductions().in_backward, 5);  // several buckets
              EXPECT_EQ(zero.reductions().in_step, 0);
            });
      }
    }
  }
}

/// A change of gradients that were sent already. They are reduced again.
struct Change {
  const char* name;
  Round round;
};

const std::vector<Change> kChanges{
    {"a second backward",
     [](Uneven& net, Zero&, int step, int rank, int world) {
       backward(net, 2 * step, rank, world);
       backward(net, 2 * step + 1, rank, world);
     }},
    {"a second backward on one rank",
     [](Uneven& net, Zero&, int step, int rank, int world) {
       backward(net, 2 * step, rank, world);
       if (rank == 1) backward(net, 2 * step + 1, rank, world);
     }},
    {"a gradient that is scaled",
     [](Uneven& net, Zero&, int step, int rank, int world) {
       backward(net, step, rank, world);
       at::NoGradGuard no_grad;
       net->parameters()[1].mutable_grad().mul_(0.5);
     }},
    {"a detached gradient that is clamped",
     [](Uneven& net, Zero&, int step, int rank, int world) {
       backward(net, step, rank, world);
       net->parameters()[0].grad().data().clamp_(-0.01, 0.01);
     }},
    {"a write through a pointer",
     [](Uneven& net, Zero&, int step, int rank, int world) {
       backward(net, step, rank, world);
       if (rank == 0) *net->parameters().back().grad().data_ptr<float>() = 3;
     }},
    {"a gradient that is replaced",
     [](Uneven& net, Zero&, int step, int rank, int world) {
       backward(net, step, rank, world);
       auto parameter = net->parameters()[1];
       parameter.mutable_grad() = at::ones_like(parameter);
     }},
    {"a gradient that is removed",
     [](Uneven& net, Zero&, int step, int rank, int world) {
       backward(net, step, rank, world);
       net->parameters()[1].mutable_grad() = at::Tensor();
     }},
    {"zero_grad() and another backward",
     [](Uneven& net, Zero& zero, int step, int rank, int world) {
       backward(net, 2 * step, rank, world);
       zero.zero_grad();
       backward(net, 2 * step + 1, rank, world);
     }},
    {"zero_grad() of zeros after clipping",
     [](Uneven& net, Zero& zero, int step, int rank, int world) {
       backward(net, 2 * step, rank, world);
       zero.clip_grad_norm_(0.1);
       zero.zero_grad(false);
     }},
};

TEST(ZeroEarly, AGradientThatChangesAfterItWasSentIsReducedAgain) {
  for (const auto& change : kChanges) {
    SCOPED_TRACE(change.name);
    for (const auto& hosts : {Hosts{0, 1}, Hosts{0, 0, 1}}) {
      for (const auto& optimizer : optimizers()) {
        expect_same_training(hosts, optimizer, Partition::flat, change.round,
                             [](const Zero& zero) { EXPECT_GT(zero.reductions().in_step, 0); });
      }
    }
  }
}

TEST(ZeroEarly, AfterReductionsInVainBackwardWaitsSomeStepsBeforeItReducesAgain) {
  run_ranks_on({0, 1}, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"), early(true));
    std::vector<int64_t> in_backward;
    for (int step = 0; step < 40; ++step) {
      const auto before = zero.reductions().in_backward;
      backward(net, step, rank, 2);
      if (step < 20) backward(net, step, rank, 2);
      zero.step();
      zero.zero_grad();
      in_backward.push_back(zero.reductions().in_backward - before);
    }
    EXPECT_GT(in_backward[0], 1);
    for (int step = 1; step < 17; ++step) EXPECT_EQ(in_backward[step], 0) << step;
    EXPECT_GT(in_backward[17], 1);  // in vain again
    for (int step = 18; step < 34; ++step) EXPECT_EQ(in_backward[step], 0) << step;
    for (int step = 34; step < 40; ++step) EXPECT_EQ(in_backward[step], in_backward[0]) << step;
  });
}

TEST(ZeroEarly, ARankWithoutBackwardTakesPart) {
  expect_same_training(
      {0, 0, 1}, factory("AdamW"), Partition::flat,
      [](Uneven& net, Zero&, int step, int rank, int world) {
        if (step % 2 == 0 || rank != 1) backward(net, step, rank, world);
      },
      [](const Zero& zero) { EXPECT_EQ(zero.reductions().in_step, 0); });
}

TEST(ZeroEarly, OtherCollectivesMayComeBetweenBackwardAndStepInAnyOrder) {
  run_ranks_on({0, 0, 1}, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"), early(true));
    for (int step = 0; step < 3; ++step) {
      auto loss = loss_of(net(rows(step, rank, 3)));
      auto logged = loss.detach().clone();
      if (rank == 1) group.all_reduce(logged);
      loss.backward();
      if (rank != 1) group.all_reduce(logged);
      zero.step();
      zero.zero_grad();
    }
  });
}

TEST(ZeroEarly, ParametersThatAreFrozenOrAddedBetweenBackwardAndStep) {
  run_ranks_on({0, 0, 1}, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8), other = seeded<Uneven>(8);
    auto more = seeded<Uneven>(9), others = seeded<Uneven>(9);
    Zero sooner(*net, group, factory("AdamW"), early(true));
    Zero later(*other, group, factory("AdamW"), early(false));
    const auto train = [&](Uneven& first, Uneven& second, Zero& zero) {
      for (int step = 0; step < 6; ++step) {
        if (step == 4) first->parameters()[0].set_requires_grad(true);
        backward(first, step, rank, 3);
        if (step > 2) backward(second, step, rank, 3);
        if (step == 1) first->parameters()[0].set_requires_grad(false);
        if (step == 2) {
          NamedParameters added;
          for (const auto& item : second->named_parameters())
            added.emplace_back("more." + item.key(), item.value());
          zero.add_param_group({added, {}});
        }
        zero.step();
        zero.zero_grad();
      }
    };
    train(net, more, sooner);
    train(other, others, later);
    expect_same_weights(net, other);
    expect_same_weights(more, others);
    EXPECT_GT(sooner.reductions().in_backward, 0);
  });
}

TEST(ZeroEarly, IsTheDefaultOnSeveralHostsAlone) {
  for (const auto& hosts : {Hosts{0, 0}, Hosts{0, 1}}) {
    run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(8);
      Zero zero(*net, group, factory("AdamW"));
      backward(net, 0, rank, 2);
      zero.step();
      EXPECT_EQ(zero.reductions().in_backward, hosts[0] == hosts[1] ? 0 : 1);
    });
  }
}

TEST(ZeroEarly, TheMeanTakesTheMemoryOfThisRanksPart) {
  run_ranks_on({0, 1}, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"), early(true));
    const auto before = zero.memory().gradients;
    backward(net, 0, rank, 2);
    zero.step();
    int64_t owned = 0;
    for (const auto& shard : zero.shards()) owned += shard.numel;
    EXPECT_EQ(zero.memory().gradients - before, owned * 4);
  });
}

}  // namespace
