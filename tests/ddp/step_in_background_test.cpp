// Overlap::background: parameters are updated when their gradients have arrived.
#include <array>
#include <chrono>
#include <future>
#include <map>
#include <sstream>
#include <string>

#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "ddp/background_model.h"
#include "ddp/bucket_order.h"
#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/error.h"
#include "tessera/optim.h"
#include "tessera/optim/fused_optimizer.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/step/replicas.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

Optimizer amsgrad(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<FusedAdam>(
      parameters, torch::optim::AdamOptions(0.05).amsgrad(true).weight_decay(0.1));
}

Optimizer sgd(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<FusedSGD>(parameters,
                                    torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true));
}

Optimizer without_state(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<FusedSGD>(parameters, torch::optim::SGDOptions(0.05));
}

Optimizer rmsprop(const std::vector<at::Tensor>& parameters) {
  return default_optimizers().factory(
      "RMSprop", {{"lr", 0.01}})({torch::optim::OptimizerParamGroup(parameters)});
}

TEST(StepInBackground, TrainsBitByBitAsAStepThatWaits) {
  for (const auto& hosts : kPlacements) {
    for (const auto make : {adamw, amsgrad, sgd, without_state, rmsprop, torch_adam})
      expect_same_training(hosts, make);
    expect_same_training(hosts, adamw, {.find_unused_parameters = true});
    expect_same_training(hosts, sgd, {.static_graph = true});
  }
  expect_same_training({0, 0, 1}, adamw, {.wire = {.gradients = WireFormat::int8}});
}

TEST(StepInBackground, UpdatesParametersOfOtherKindsAtOnce) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    const auto train = [&](bool background) {
      auto net = seeded<Mixed>(3);
      DistributedDataParallel<Mixed> ddp(net, group, small_buckets(background));
      auto own = adamw(net->parameters());
      for (int i = 0; i < 5; ++i) {
        auto generator = at::make_generator<at::CPUGeneratorImpl>(10 * i + rank);
        ddp(torch::randn({2, 2, 4, 4}, generator)).square().sum().backward();
        own->step();
        EXPECT_TRUE(has_memory(net->conv->weight));  // channels last
        EXPECT_TRUE(has_memory(net->head->weight));  // float64
        EXPECT_EQ(has_memory(net->conv->bias), !background || i < 2);
        own->zero_grad();
      }
      return net;
    };
    expect_same_weights(train(true), train(false));
  });
}

/// An alias that was made before the wrapper would not notice that an update is late.
TEST(StepInBackground, UpdatesParametersWithOlderAliasesAtOnce) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    const auto train = [&](bool background) {
      auto net = seeded<Uneven>(8);
      const auto alias = net->last->weight.detach();
      Model ddp(net, group, small_buckets(background));
      auto own = adamw(net->parameters());
      at::Tensor state;  // an alias of what was made in the first steps
      for (int i = 0; i < 5; ++i) {
        loss_of(ddp(rows(i, rank, 2))).backward();
        own->step();
        if (i == 1) {
          const auto made = get_state(*own, net->first->weight);
          state = made->tensors.at("exp_avg").detach();
        }
        EXPECT_TRUE(has_memory(net->last->weight));
        EXPECT_TRUE(has_memory(net->first->weight));
        EXPECT_EQ(has_memory(net->second->weight), !background || i < 2);
        clear_gradients(net->parameters());
      }
      return std::pair(at::cat({alias.flatten(), state.flatten()}), net);
    };
    const auto [late, late_net] = train(true);
    const auto [plain, plain_net] = train(false);
    EXPECT_TRUE(at::equal(late, plain));
    expect_same_weights(late_net, plain_net);
  });
}

/// A handle of the optimizer's state is the state, also if it is older than the first late update.
TEST(StepInBackground, HandlesOfStateStayTheState) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    Warm warm(group, true);
    const auto& weight = warm.net->first->weight;
    const auto before = get_state(*warm.optimizer, weight)->tensors.at("exp_avg");
    warm.backward(1);
    warm.optimizer->step();
    EXPECT_FALSE(has_memory(before));
    EXPECT_TRUE(before.is_same(get_state(*warm.optimizer, weight)->tensors.at("exp_avg")));
    Warm plain(group, false);
    plain.backward(1);
    plain.step();
    const auto expected = get_state(*plain.optimizer, plain.net->first->weight);
    EXPECT_TRUE(at::equal(before, expected->tensors.at("exp_avg")));
  });
}

/// A model whose third step is under way, and the parameters that this step leads to.
struct UnderWay {
  explicit UnderWay(const ProcessGroup& group)
      : warm(group, true), expected(values_after_plain_step(group)) {
    warm.backward(1);
    warm.optimizer->step();
    for (const auto& p : warm.net->parameters()) EXPECT_FALSE(has_memory(p));
  }
  static std::map<std::string, at::Tensor> values_after_plain_step(const ProcessGroup& group) {
    Warm plain(group, false);
    plain.backward(1);
    plain.step();
    std::map<std::string, at::Tensor> values;
    for (const auto& p : plain.net->named_parameters()) values[p.key()] = p.value().detach();
    return values;
  }
  void expect_values() const {
    for (const auto& p : warm.net->named_parameters())
      EXPECT_TRUE(at::equal(p.value(), expected.at(p.key()))) << p.key();
  }
  Warm warm;
  std::map<std::string, at::Tensor> expected;
};

/// Rank 1 begins its backward when rank 0's step has returned.
TEST(StepInBackground, ReturnsBeforeOtherRanksHaveBegunTheirBackward) {
  for (const auto& hosts : {Hosts{0, 1}, {0, 0}}) {
    std::promise<void> returned;
    run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
      const auto expected = UnderWay::values_after_plain_step(group);
      Warm warm(group, true);
      if (rank == 1) {
        const auto waited = returned.get_future().wait_for(std::chrono::seconds(10));
        ASSERT_EQ(waited, std::future_status::ready);
      }
      warm.backward(1);
      warm.step();
      if (rank == 0) {
        for (const auto& parameter : warm.net->parameters()) {
          EXPECT_FALSE(has_memory(parameter));
          const auto state = get_state(*warm.optimizer, parameter);
          for (const auto& [name, tensor] : state->tensors)
            EXPECT_FALSE(has_memory(tensor)) << name;
        }
        returned.set_value();
      }
      for (const auto& p : warm.net->named_parameters())
        EXPECT_TRUE(at::equal(p.value(), expected.at(p.key()))) << p.key();
    });
  }
}

TEST(StepInBackground, WhateverReadsAParameterOrItsStateWaits) {
  run_ranks_on({0, 1, 1}, [](ProcessGroup group, int) {
    {
      const UnderWay one(group);
      one.expect_values();
    }
    {
      const UnderWay one(group);
      const auto row = one.warm.net->last->weight.detach()[1];
      EXPECT_TRUE(at::equal(row, one.expected.at("last.weight")[1]));
    }
    {
      const UnderWay one(group);
      group.barrier();
      std::vector<std::pair<std::string, at::Tensor>> replicas;
      for (const auto& p : one.warm.net->named_parameters())
        replicas.emplace_back(p.key(), p.value());
      EXPECT_EQ(check_replicas(replicas, group), "");
      one.expect_values();
    }
    {
      const UnderWay one(group);
      auto sum = one.warm.net->last->weight.detach();
      group.all_reduce(sum, 1.0 / 3);
      EXPECT_TRUE(at::allclose(sum, one.expected.at("last.weight")));
    }
    {
      UnderWay one(group);
      one.warm.ddp->wait();
      for (const auto& p : one.warm.net->parameters()) EXPECT_TRUE(has_memory(p));
      one.expect_values();
    }
    {
      UnderWay one(group);
      std::ostringstream archive;
      EXPECT_ANY_THROW(torch::save(one.warm.net, archive));  // libtorch reads without operators
      EXPECT_ANY_THROW(torch::save(*one.warm.optimizer, archive));
      one.warm.ddp->wait();
      torch::save(one.warm.net, archive);
      torch::save(*one.warm.optimizer, archive);
    }
    Warm plain(group, false);
    plain.backward(1);
    plain.step();
    const auto state = state_dict(*plain.optimizer, named_parameters(*plain.net));
    {
      const UnderWay one(group);
      const auto late = state_dict(*one.warm.optimizer, named_parameters(*one.warm.net));
      expect_same_state(late, state);
    }
    {
      const UnderWay one(group);
      const auto& weight = one.warm.net->first->weight;
      const auto moment = get_state(*one.warm.optimizer, weight)->tensors.at("exp_avg");
      EXPECT_TRUE(at::equal(moment, state.state.at("first.weight").tensors.at("exp_avg")));
    }
  });
}

TEST(StepInBackground, WhatChangesGradientsComesAfterTheUpdate) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int) {
    {
      const UnderWay one(group);
      for (const auto& gradient : one.warm.gradients()) gradient.zero_();
      one.expect_values();
    }
    {
      UnderWay one(group);
      one.warm.net->zero_grad(true);
      one.expect_values();
    }
  });
}

TEST(StepInBackground, ASecondStepWithTheSameGradientsComesAfterTheFirst) {
  run_ranks_on({0, 1, 1}, [](ProcessGroup group, int) {
    const auto train = [&](bool background) {
      Warm warm(group, background);
      warm.backward(1);
      for (int i = 0; i < 3; ++i) warm.optimizer->step();
      return warm.net;
    };
    expect_same_weights(train(true), train(false));
  });
}

TEST(StepInBackground, TwoOptimizersMayShareTheParametersOfABucket) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    const auto train = [&](bool background) {
      auto net = seeded<Uneven>(8);
      Model ddp(net, group, small_buckets(background));
      std::array<std::vector<at::Tensor>, 2> halves;
      for (const auto& p : net->parameters()) halves[p.dim() - 1].push_back(p);
      const auto weights = adamw(halves[1]), others = sgd(halves[0]);
      for (int i = 0; i < 5; ++i) {
        loss_of(ddp(rows(i, rank, 2))).backward();
        weights->step();
        others->step();
        clear_gradients(net->parameters());
      }
      return net;
    };
    expect_same_weights(train(true), train(false));
  });
}

TEST(StepInBackground, TheWrapperAndTheOptimizerMayEndBeforeTheUpdate) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int) {
    {
      UnderWay one(group);
      one.warm.ddp.reset();
      for (const auto& p : one.warm.net->parameters()) EXPECT_TRUE(has_memory(p));
      one.expect_values();
    }
    {
      UnderWay one(group);
      one.warm.optimizer.reset();
      one.expect_values();
    }
    {
      UnderWay one(group);
      auto optimizer = std::move(one.warm.optimizer);
      one.warm.ddp.reset();
      one.warm.net = nullptr;
    }
  });
}

TEST(StepInBackground, LoadedValuesWinOverAnUpdateUnderWay) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int) {
    UnderWay one(group);
    Warm other(group, false);
    const auto state = state_dict(*other.optimizer, named_parameters(*other.net));
    load_state_dict(*one.warm.optimizer, named_parameters(*one.warm.net), state);
    {
      const at::NoGradGuard no_grad;
      for (auto& p : one.warm.net->named_parameters())
        p.value().copy_(other.net->named_parameters()[p.key()]);
    }
    clear_gradients(one.warm.net->parameters());
    one.warm.backward(5);
    one.warm.step();
    other.backward(5);
    other.step();
    expect_same_weights(one.warm.net, other.net);
  });
}

TEST(StepInBackground, MakesTheCollectivesOfAStepThatWaits) {
  for (const auto& hosts : {Hosts{0, 1, 1}, {0, 0}}) {
    run_ranks_on(hosts, [](ProcessGroup group, int) {
      const auto moved = [&](bool background) {
        Warm warm(group, background);
        warm.ddp->wait();
        group.reset_stats();
        warm.backward(1);
        warm.step();
        warm.ddp->wait();
        const auto stats = group.stats();
        return std::array<uint64_t, 4>{stats.all_reduce.calls, stats.all_reduce.bytes_sent,
                                       stats.all_reduce.bytes_received, stats.broadcast.calls};
      };
      EXPECT_EQ(moved(true), moved(false));
    });
  }
}

/// Rank 1 ends within its backward.
TEST(StepInBackground, ALostRankEndsTheNextForward) {
  const auto errors = run_ranks_catching(
      2,
      [&](ProcessGroup group, int rank) {
        Warm warm(group, true);
        if (rank == 1)
          warm.net->second->weight.register_hook(
              [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("rank 1 ends"); });
        warm.backward(1);
        warm.step();
        EXPECT_THROW(warm.backward(2), BrokenWorldError);
        EXPECT_THROW(warm.net->first->weight.sum(), BrokenWorldError);
        EXPECT_FALSE(has_memory(warm.net->first->weight));
      },
      {.timeout = std::chrono::seconds(5)}, {0, 1});
  EXPECT_FALSE(errors[0]) << message_of(errors[0]);
  EXPECT_EQ(message_of(errors[1]), "rank 1 ends");
}

TEST(BucketOrder, SpreadsThePartWithinBackwardAndReversesTheRest) {
  using Order = std::vector<size_t>;
  EXPECT_EQ(order_of_reductions(6, 1), (Order{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(order_of_reductions(6, 2), (Order{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(order_of_reductions(6, 0.5), (Order{0, 2, 4, 5, 3, 1}));
  EXPECT_EQ(order_of_reductions(7, 0.3), (Order{0, 3, 6, 5, 4, 2, 1}));
  EXPECT_EQ(order_of_reductions(5, 0.001), (Order{0, 4, 3, 2, 1}));
  EXPECT_EQ(order_of_reductions(1, 0.5), (Order{0}));
  EXPECT_EQ(order_of_reductions(0, 0.5), (Order{}));
}

}  // namespace
