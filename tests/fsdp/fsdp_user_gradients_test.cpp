// What a program itself does with gradients and values of the shards and of the module's parameters
// under FSDP: it means what it means in plain training, or is an error that names the right line.

#include <functional>
#include <map>
#include <type_traits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/optim/fused_optimizer.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::map<std::string, FullyShardedDataParallelOptions> ways_to_shard() {
  std::map<std::string, FullyShardedDataParallelOptions> ways;
  ways["one unit"] = {};
  ways["leaves"] = every_leaf();
  ways["whole"] = every_leaf();
  ways["whole"].partition = Partition::whole;
  ways["no_shard"] = every_leaf();
  ways["no_shard"].sharding_strategy = ShardingStrategy::no_shard;
  return ways;
}

using Wrapped = FullyShardedDataParallel<Chain>;

/// `train(loss, parameters, module)` for FSDP of every kind and for the plain module; the weights
/// must then be equal.
template <class Train>
void expect_as_plain(Train&& train, int worlds = 3) {
  for (int world = 1; world <= worlds; ++world) {
    for (const auto& [how, options] : ways_to_shard()) {
      const auto where = how + ", world " + std::to_string(world);
      run_ranks(world, [&, &options = options](ProcessGroup group, int rank) {
        auto net = seeded<Chain>(1, 3), plain = seeded<Chain>(1, 3);
        Wrapped fsdp(net, group, options);
        const auto run = [&](auto&& loss, const std::vector<at::Tensor>& parameters, Chain module) {
          if constexpr (std::is_invocable_v<Train, decltype(loss), decltype(parameters), Chain>)
            train(loss, parameters, module);
          else train(loss, parameters);
        };
        run([&](int i) { return loss_of(fsdp(rows(i, rank, world))); }, fsdp.parameters(), net);
        run([&](int i) { return loss_of(plain(rows(i))); }, plain->parameters(), plain);
        bool trained = false;
        for (const auto& [name, value] : fsdp.state_dict(-1)) {
          const auto expected = plain->named_parameters()[name];
          EXPECT_TRUE(at::allclose(value, expected, 1e-4, 1e-6)) << where << ", " << name;
          trained |= !at::equal(expected, seeded<Chain>(1, 3)->named_parameters()[name]);
        }
        EXPECT_TRUE(trained);
      });
    }
  }
}

torch::optim::SGD momentum(const std::vector<at::Tensor>& parameters) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}

at::Tensor penalty(const std::vector<at::Tensor>& parameters) {
  auto sum = at::zeros({});
  for (const auto& parameter : parameters) sum = sum + parameter.square().sum() * 0.05;
  return sum;
}

TEST(FsdpUserGradients, APenaltyOverTheShardsCountsWheneverItWasComputed) {
  for (const bool before_forward : {false, true}) {
    for (const int backwards : {1, 2}) {
      expect_as_plain([&](auto&& loss, const std::vector<at::Tensor>& parameters) {
        auto optimizer = momentum(parameters);
        for (int i = 0; i < 4; ++i) {
          clear_gradients(parameters);
          for (int k = 0; k < backwards; ++k) {
            auto term = before_forward ? penalty(parameters) : at::Tensor();
            const auto value = loss(2 * i + k);
            if (!before_forward) term = penalty(parameters);
            (value + term).backward();
          }
          optimizer.step();
        }
      });
    }
  }
}

TEST(FsdpUserGradients, AGradientThatIsSetOnAShardCounts) {
  expect_as_plain([](auto&& loss, const std::vector<at::Tensor>& parameters) {
    auto optimizer = momentum(parameters);
    const auto set = [&](double value) {
      for (const auto& parameter : parameters)
        parameter.mutable_grad() = at::full_like(parameter.detach(), value);
    };
    for (int i = 0; i < 3; ++i) {
      set(0.25 * i);
      loss(i).backward();
      optimizer.step();
      loss(10 + i).backward();
      set(0.5);
      optimizer.step();
    }
  });
}

TEST(FsdpUserGradients, HooksOfAShardGetTheGradientOfEachBackwardAndMayReplaceIt) {
  expect_as_plain([](auto&& loss, const std::vector<at::Tensor>& parameters) {
    std::vector<int> calls(parameters.size(), 0);
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i].register_hook([&calls, i](at::Tensor gradient) {
        ++calls[i];
        return gradient.clamp(-0.02, 0.01);
      });
    parameters[0].register_hook([](at::Tensor gradient) { return gradient * 3; });
    parameters[1].register_hook([](const at::Tensor&) {});
    auto optimizer = momentum(parameters);
    for (int i = 0; i < 4; ++i) {
      if (i % 2 == 0) clear_gradients(parameters);
      loss(2 * i).backward();
      loss(2 * i + 1).backward();
      optimizer.step();
    }
    for (size_t i = 0; i < parameters.size(); ++i) EXPECT_EQ(calls[i], 8) << i;
  });
}

TEST(FsdpUserGradients, ABackwardThatThrowsKeepsTheGradientsOfTheOnesBefore) {
  for (const bool hooked : {false, true}) {
    run_ranks(2, [&](ProcessGroup group, int rank) {
      Chain net = seeded<Chain>(1, 3);
      Wrapped fsdp(net, group, every_leaf());
      const auto shards = fsdp.parameters();
      for (const auto& shard : shards)
        if (hooked) shard.register_hook([](const at::Tensor&) {});
      loss_of(fsdp(rows(0, rank, 2))).backward();
      auto x = rows(1, rank, 2).set_requires_grad(true);
      x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
      EXPECT_THROW(loss_of(fsdp(x)).backward(), std::runtime_error);
      for (const auto& shard : shards) EXPECT_TRUE(shard.grad().defined());
      fsdp.zero_grad();
      loss_of(fsdp(rows(2, rank, 2))).backward();
      const double after = fsdp.clip_grad_norm_(INFINITY);
      fsdp.zero_grad();
      loss_of(fsdp(rows(2, rank, 2))).backward();
      EXPECT_EQ(fsdp.clip_grad_norm_(INFINITY), after);
    });
  }
}

TEST(FsdpUserGradients, ValuesThatReplaceTheShardsAreUsed) {
  expect_as_plain([](auto&& loss, const std::vector<at::Tensor>& parameters) {
    auto optimizer = momentum(parameters);
    std::vector<double> losses;
    for (int i = 0; i < 3; ++i) {
      const auto before = [&] {
        const at::NoGradGuard no_grad;
        return loss(i).template item<double>();
      };
      const double old = before();
      const auto values = torch::nn::utils::parameters_to_vector(parameters).detach() * 0.5 + 0.1;
      torch::nn::utils::vector_to_parameters(values, parameters);
      EXPECT_NE(before(), old);
      clear_gradients(parameters);
      loss(i).backward();
      optimizer.step();
    }
    // Without a forward behind it.
    torch::nn::utils::vector_to_parameters(
        torch::nn::utils::parameters_to_vector(parameters).detach() * 2, parameters);
  });
}

TEST(FsdpUserGradients, ShardsThatExchangeTheirMemoryExchangeTheirValues) {
  const auto exchange = [](auto&&, const std::vector<at::Tensor>& parameters) {
    const auto first = parameters[0].detach(), second = parameters[2].detach();
    auto one = parameters[0], other = parameters[2];
    one.set_data(second);
    other.set_data(first);
  };
  expect_as_plain(exchange, 1);  // elsewhere their parts are not those of one another
}

TEST(FsdpUserGradients, ShardsMayNotBeReplacedBetweenForwardAndBackwardNorInShape) {
  for (const auto& [how, options] : ways_to_shard()) {
    run_ranks(2, [&, &options = options](ProcessGroup group, int rank) {
      Chain net = seeded<Chain>(1, 3);
      Wrapped fsdp(net, group, options);
      const auto replace = [&](int more) {
        for (auto& shard : fsdp.parameters())
          shard.set_data(at::zeros(shard.dim() == 1 ? std::vector<int64_t>{shard.numel() + more}
                                                    : shard.sizes().vec()));
      };
      if (how != "no_shard") {
        const auto loss = loss_of(fsdp(rows(0, rank, 2)));
        replace(0);
        EXPECT_THAT(thrown_by([&] { loss.backward(); }),
                    AllOf(HasSubstr("modified since the forward"), HasSubstr("list.0.weight")))
            << how;
        loss_of(fsdp(rows(0, rank, 2))).backward();
      }
      replace(1);
      EXPECT_THAT(thrown_by([&] { fsdp(rows(0, rank, 2)); }),
                  AllOf(HasSubstr("since set_data()"), HasSubstr("shard of parameter list.0.")))
          << how;
    });
  }
}

/// It means what clearing the gradient alone means.
TEST(FsdpUserGradients, AGradientThatIsSetOnTheModuleAndClearedAgainCountsAsCleared) {
  expect_as_plain([](auto&& loss, const std::vector<at::Tensor>& parameters, Chain module) {
    auto optimizer = momentum(parameters);
    const auto set_and_clear = [&](double value) {
      for (const auto& parameter : module->parameters())
        parameter.mutable_grad() = at::full(parameter.sizes(), value);
      module->zero_grad(/*set_to_none=*/true);
    };
    set_and_clear(7);
    for (int i = 0; i < 3; ++i) {
      auto value = loss(i);
      if (i == 1) set_and_clear(5);
      value.backward();
      optimizer.step();
      set_and_clear(3);
    }
  });
}

/// Gradients that are set on the shards and cleared again, by the module or by the optimizer.
template <class Optimizer, class Loss>
void set_step_and_clear(Loss&& loss, const std::vector<at::Tensor>& parameters, Chain module,
                        bool by_module, bool to_none) {
  Optimizer optimizer(parameters, torch::optim::SGDOptions(0.02).momentum(0.9));
  const auto set = [&](double value) {
    for (const auto& parameter : parameters)
      parameter.mutable_grad() = at::full_like(parameter.detach(), value);
  };
  const auto clear = [&] {
    if (by_module) module->zero_grad(to_none);
    else if (to_none) clear_gradients(parameters);
    else optimizer.zero_grad();
  };
  const std::function<void()> calls[] = {[&] { set(0.25); }, clear, [&] { loss(1).backward(); },
                                         [&] { optimizer.step(); }};
  // Gradients that are cleared before any backward and after another clearing, and between them a
  // de Bruijn sequence: every three calls one after another, with repetitions.
  for (const char k : std::string("013"
                                  "0001002003011012013021022023031032033111211312212313213322232333"
                                  "1013"))
    calls[k - '0']();
}

TEST(FsdpUserGradients, GradientsOfTheShardsCanBeSetAndClearedInAnyOrder) {
  for (const bool by_module : {false, true}) {
    for (const bool to_none : {false, true}) {
      expect_as_plain([&](auto&& loss, const std::vector<at::Tensor>& parameters, Chain module) {
        set_step_and_clear<torch::optim::SGD>(loss, parameters, module, by_module, to_none);
        set_step_and_clear<FusedSGD>(loss, parameters, module, by_module, to_none);
      });
    }
  }
}

/// After `prepare(fsdp, net)` the program sets `.grad` of one of the module's parameters; `next`
/// must then be an error on all ranks.
void expect_refused(const std::string& name, const std::function<void(Wrapped&)>& prepare,
                    const std::function<void(Wrapped&)>& next) {
  for (int world = 1; world <= 3; ++world) {
    for (const auto& [how, options] : ways_to_shard()) {
      run_ranks(world, [&, &options = options](ProcessGroup group, int rank) {
        Chain net = seeded<Chain>(1, 3);
        Wrapped fsdp(net, group, options);
        prepare(fsdp);
        const auto parameter = net->named_parameters()[name];
        parameter.mutable_grad() = at::ones(parameter.sizes());
        EXPECT_THAT(thrown_by([&] { next(fsdp); }),
                    AllOf(HasSubstr("FullyShardedDataParallel: rank "),
                          HasSubstr(".grad of parameter " + name + " of the module itself was set"),
                          HasSubstr(".grad() of fsdp.named_parameters()")))
            << how << ", world " << world;
      });
    }
  }
}

TEST(FsdpUserGradients, AGradientThatIsSetOnTheModuleIsAnErrorWhereverItIsNext) {
  const auto nothing = [](Wrapped&) {};
  const auto backward = [](Wrapped& fsdp) { loss_of(fsdp(at::ones({2, 3}))).backward(); };
  const auto forward = [](Wrapped& fsdp) { fsdp(at::ones({2, 3})); };
  for (const std::string name : {"list.0.weight", "head.bias"}) {
    expect_refused(name, nothing, forward);
    expect_refused(name, backward, forward);
    expect_refused(name, backward, [](Wrapped& fsdp) { fsdp.clip_grad_norm_(1); });
    expect_refused(name, backward, [](Wrapped& fsdp) { fsdp.clip_grad_value_(1); });
    expect_refused(name, backward, [](Wrapped& fsdp) { fsdp.zero_grad(); });
    for (const auto& prepare : {std::function<void(Wrapped&)>(nothing), {backward}}) {
      expect_refused(name, prepare, [](Wrapped& fsdp) { momentum(fsdp.parameters()).step(); });
      expect_refused(name, prepare, [](Wrapped& fsdp) { FusedAdam(fsdp.parameters()).step(); });
      expect_refused(name, prepare, [](Wrapped& fsdp) { momentum(fsdp.parameters()).zero_grad(); });
    }
    at::Tensor loss[3];
    expect_refused(
        name,
        [&](Wrapped& fsdp) {
          loss[fsdp.group().rank()] = loss_of(fsdp(at::ones({2, 3})));
        },
        [&](Wrapped& fsdp) { loss[fsdp.group().rank()].backward(); });
  }
}

/// A step of the loss plus the square norm of this rank's gradient, by autograd::grad() over
/// `whole`, the module's parameters.
template <class Loss>
void step_penalised(Loss&& loss, const std::vector<at::Tensor>& whole,
                    const std::vector<at::Tensor>& parameters) {
  auto optimizer = momentum(parameters);
  for (int i = 0; i < 3; ++i) {
    clear_gradients(parameters);
    const auto value = loss(i);
    auto sum = value;
    for (const auto& gradient :
         torch::autograd::grad({value}, whole, {}, c10::nullopt, /*create_graph=*/true))
      sum = sum + gradient.square().sum();
    sum.backward();
    optimizer.step();
  }
}

TEST(FsdpUserGradients, AGraphThroughGradIsAnErrorThatNamesAutogradGradWhichTrains) {
  for (const auto& [how, options] : ways_to_shard()) {
    for (int world = 1; world <= 3; ++world) {
      run_ranks(world, [&, &options = options](ProcessGroup group, int rank) {
        Chain net = seeded<Chain>(1, 3), plain = seeded<Chain>(1, 3);
        Wrapped fsdp(net, group, options);
        EXPECT_THAT(thrown_by([&] { loss_of(fsdp(rows(0))).backward({}, true, true); }),
                    AllOf(HasSubstr("this backward has create_graph"), HasSubstr("parameter "),
                          HasSubstr("expected torch::autograd::grad(…, create_graph)")));
        for (const auto& shard : fsdp.parameters()) EXPECT_FALSE(shard.grad().defined());
        step_penalised([&](int i) { return loss_of(fsdp(rows(i))); }, net->parameters(),
                       fsdp.parameters());
        step_penalised([&](int i) { return loss_of(plain(rows(i))); }, plain->parameters(),
                       plain->parameters());
        for (const auto& [name, value] : fsdp.state_dict(-1))
          EXPECT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-4, 1e-6))
              << how << ", world " << world << ", " << name;
      });
    }
  }
}

}  // namespace
