#include "tessera/distributed_optimizer.h"

#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/schedulers/step_lr.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/error.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Options = DistributedOptimizerOptions;

OptimizerFactory sgd(double lr) { return default_optimizers().factory("SGD", {{"lr", lr}}); }

/// Twelve vectors. Each step chooses which of them it uses, and in which order. The gradients
/// arrive in the reverse order of use.
struct ManyImpl : torch::nn::Module {
  ManyImpl() {
    for (int i = 0; i < 12; ++i) {
      weights.push_back(
          register_parameter("w" + std::to_string(10 + i), torch::full({5 + i}, 0.1 * (i + 1))));
    }
  }
  torch::Tensor forward(torch::Tensor x, const std::vector<int>& use) {
    for (const int i : use) x = x + torch::tanh(weights[i] * x.sum()).sum();
    return x;
  }
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(Many);

const std::vector<int> kForwards{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
const std::vector<int> kBackwards{11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
const std::vector<int> kWithout9{0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11};
const std::vector<int> kWithout1{0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};

at::Tensor input(int step, int rank) { return at::full({1}, 0.05 * (step + 1) + 0.02 * rank); }

/// The expected `.grad`: the sum of the ranks' gradients over `divisor`, where rank r used the
/// parameters use[r]. Undefined for a parameter that no rank used.
std::vector<at::Tensor> expected_gradients(const Many& net, int step,
                                           const std::vector<std::vector<int>>& use,
                                           double divisor) {
  Many copy;
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < 12; ++i) copy->weights[i].copy_(net->weights[i]);
  std::vector<at::Tensor> sums(12);
  for (size_t rank = 0; rank < use.size(); ++rank) {
    if (use[rank].empty()) continue;
    at::AutoGradMode with_grad(true);
    for (auto& weight : copy->weights) weight.mutable_grad() = at::Tensor();
    copy(input(step, static_cast<int>(rank)), use[rank]).sum().backward();
    for (size_t i = 0; i < 12; ++i) {
      if (!copy->weights[i].grad().defined()) continue;
      const auto share = copy->weights[i].grad() / divisor;
      sums[i] = sums[i].defined() ? sums[i] + share : share;
    }
  }
  return sums;
}

void expect_gradients(const Many& net, const std::vector<at::Tensor>& expected,
                      const std::string& where) {
  for (size_t i = 0; i < 12; ++i) {
    ASSERT_EQ(net->weights[i].grad().defined(), expected[i].defined()) << where << " w" << 10 + i;
    if (expected[i].defined())
      EXPECT_TRUE(at::allclose(net->weights[i].grad(), expected[i], 1e-5, 1e-7))
          << where << " w" << 10 + i;
  }
}

struct Case {
  std::string name;
  Options options;
};

class Parity : public ::testing::TestWithParam<Case> {};

TEST_P(Parity, EqualsDataParallelBitByBitAndOneProcessClosely) {
  auto plain = seeded<Uneven>(1);
  auto reference = adamw(plain->parameters());
  for (int step = 0; step < 5; ++step) {
    reference->zero_grad();
    loss_of(plain(rows(step))).backward();
    reference->step();
  }
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1 + rank),
           other = seeded<Uneven>(1);  // construction broadcasts rank 0's weights
      DistributedOptimizer optimizer(*net, group, adamw_factory(), GetParam().options);
      DistributedDataParallel ddp(other, group);
      auto local = adamw(other->parameters());
      for (int step = 0; step < 5; ++step) {
        optimizer.zero_grad();
        const auto loss = loss_of(net(rows(step, rank, world)));
        optimizer.backward(loss);
        optimizer.step();
        local->zero_grad();
        const auto same = loss_of(ddp(rows(step, rank, world)));
        same.backward();
        local->step();
        ASSERT_TRUE(at::equal(loss, same)) << "step " << step << " world " << world;
      }
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        ASSERT_TRUE(at::equal(net->parameters()[i], other->parameters()[i])) << "world " << world;
        ASSERT_TRUE(at::allclose(net->parameters()[i], plain->parameters()[i], 1e-5, 1e-6))
            << "world " << world;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Parity,
    ::testing::Values(Case{"single", {.reduce_method = "mean"}},
                      Case{"any_case", {.reduce_method = "MeAn", .bcast_period = 2}},
                      Case{"packed", {.reduce_method = "mean", .param_pack = true}},
                      Case{"small_packs",
                           {.reduce_method = "MEAN",
                            .bcast_period = 3,
                            .param_pack = true,
                            .param_pack_thd = 20}}),
    [](const auto& tested) { return tested.param.name; });

TEST(DistributedOptimizerTest, ReduceMethodSumAddsTheGradients) {
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      Many net;
      DistributedOptimizer optimizer(*net, group, sgd(0.1), {.reduce_method = "Sum"});
      optimizer.backward(net(input(0, rank), kForwards).sum());
      expect_gradients(
          net, expected_gradients(net, 0, std::vector<std::vector<int>>(world, kForwards), 1),
          "sum");
    });
  }
}

TEST(DistributedOptimizerTest, RefusesOptionsOutOfRangeAndAMissingReduceMethod) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    Many net;
    for (const char* method : {"", "average"}) {
      try {
        DistributedOptimizer optimizer(*net, group, sgd(0.1), {.reduce_method = method});
        FAIL();
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("reduce_method"),
                                        HasSubstr("\"sum\" or \"mean\""), HasSubstr(method)));
      }
    }
    EXPECT_THROW(
        DistributedOptimizer(*net, group, sgd(0.1), {.reduce_method = "sum", .bcast_period = -2}),
        UsageError);
    EXPECT_THROW(
        DistributedOptimizer(*net, group, sgd(0.1), {.reduce_method = "sum", .param_pack_thd = 0}),
        UsageError);
    EXPECT_THROW(DistributedOptimizer(*net, group, nullptr, {.reduce_method = "sum"}), UsageError);
  });
  Many net;
  DistributedOptimizer alone(*net, ProcessGroup(), sgd(0.1), {});
  alone.backward(net(input(0, 0), kForwards).sum());
  alone.step();
}

TEST(DistributedOptimizerTest, BroadcastsEveryBcastPeriodStepsBeforeTheUpdate) {
  for (const auto& [period, broadcasts] :
       std::vector<std::pair<int64_t, uint64_t>>{{-1, 0}, {0, 1}, {3, 1 + 3}, {1, 1 + 10}}) {
    run_ranks(2, [period = period, broadcasts = broadcasts](ProcessGroup group, int rank) {
      Many net;
      group.reset_stats();
      DistributedOptimizer optimizer(*net, group, sgd(0.1),
                                     {.reduce_method = "mean", .bcast_period = period});
      for (int step = 0; step < 10; ++step) {
        optimizer.zero_grad();
        optimizer.backward(net(input(step, rank), kForwards).sum());
        optimizer.step();
      }
      EXPECT_EQ(group.stats().broadcast.calls, broadcasts) << "period " << period;
    });
  }
  run_ranks(2, [](ProcessGroup group, int rank) {
    Many net;
    DistributedOptimizer optimizer(*net, group, sgd(0),
                                   {.reduce_method = "mean", .bcast_period = 3});
    torch::NoGradGuard no_grad;
    for (int step = 1; step <= 4; ++step) {
      net->weights[0].fill_(rank + 1);
      {
        at::AutoGradMode with_grad(true);
        optimizer.backward(net(input(step, rank), kForwards).sum());
      }
      optimizer.step();
      EXPECT_EQ(net->weights[0][0].item<float>(), step == 3 ? 1 : rank + 1) << "step " << step;
      optimizer.zero_grad();
    }
    net->weights[3].fill_(rank + 7);
    optimizer.bcast_param();
    EXPECT_EQ(net->weights[3][0].item<float>(), 7);
  });
  run_ranks(2, [](ProcessGroup group,
                  int rank) {  // the update comes after the broadcast: all ranks keep it
    Many net;
    DistributedOptimizer optimizer(*net, group, sgd(1),
                                   {.reduce_method = "sum", .bcast_period = 1});
    optimizer.backward((net->weights[0] * (rank + 1)).sum());
    optimizer.step();
    EXPECT_FLOAT_EQ(net->weights[0][0].item<float>(), 0.1f - 3);
  });
}

TEST(DistributedOptimizerTest, APackIsOneCollectiveAndAddsNoBytes) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    Many net;
    uint64_t numel = 0;
    for (const auto& weight : net->weights) numel += weight.numel();
    // The gradients arrive as w21 … w10, with 64, 60, … 20 bytes. After the first 8 there are
    // 32, 28, 24 and 20 bytes.
    DistributedOptimizer optimizer(
        *net, group, sgd(0.01),
        {.reduce_method = "mean", .param_pack = true, .param_pack_thd = 59});
    for (int step = 0; step < 4; ++step) {
      group.reset_stats();
      optimizer.zero_grad();
      optimizer.backward(net(input(step, rank), kForwards).sum());
      const auto stats = group.stats();
      optimizer.step();
      const uint64_t agreement = 4 * (12 + (step == 0 ? 12 : 10));
      EXPECT_EQ(stats.all_reduce.calls, (step == 0 ? 12u : 10u) + 1) << "step " << step;
      EXPECT_EQ(stats.all_reduce.bytes_sent, 4 * numel + agreement) << "step " << step;
      EXPECT_EQ(group.stats().bytes.calls, step == 0 ? 1u : 0u)
          << "rank 0 publishes once; step " << step;
    }
    const auto packs = optimizer.packs(0);
    ASSERT_EQ(packs.size(), 10u);
    EXPECT_EQ(packs[0], std::vector<std::string>{"w21"});
    EXPECT_EQ(packs[8], (std::vector<std::string>{"w13", "w12"}));
    EXPECT_EQ(packs[9], (std::vector<std::string>{"w11", "w10"}));
  });
}

TEST(DistributedOptimizerTest, WithoutPacksManyGradientsAreOneCollective) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    Many net;
    uint64_t numel = 0;
    for (const auto& weight : net->weights) numel += weight.numel();
    DistributedOptimizer optimizer(*net, group, sgd(0.01), {.reduce_method = "mean"});
    for (int step = 0; step < 3; ++step) {
      group.reset_stats();
      optimizer.zero_grad();
      optimizer.backward(net(input(step, rank), kForwards).sum());
      EXPECT_EQ(group.stats().all_reduce.calls, 2u) << "one of gradients, one of their use";
      EXPECT_EQ(group.stats().all_reduce.bytes_sent, 4 * (numel + 12 + 1));
      optimizer.step();
    }
    EXPECT_EQ(optimizer.packs(0).size(), 1u);
  });
}

/// An allocation is a collective, so one for each of many parameters takes long. Without packs
/// `.grad` are windows of this memory.
TEST(DistributedOptimizerTest, AllPacksOfADtypeShareOneAllocation) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    std::vector<std::pair<std::string, at::Tensor>> parameters;
    for (int i = 0; i < 300; ++i)
      parameters.emplace_back(
          std::to_string(i),
          at::full({i % 7}, 1, i % 3 ? at::kFloat : at::kDouble).set_requires_grad(true));
    DistributedOptimizer optimizer({{parameters, {}, group}}, sgd(0.01), {.reduce_method = "sum"});
    auto loss = at::zeros({});
    for (const auto& [name, tensor] : parameters) loss = loss + tensor.sum() * (rank + 1);
    optimizer.backward(loss);
    std::set<const void*> storages, begins;
    for (const auto& [name, tensor] : parameters) {
      EXPECT_TRUE(at::equal(tensor.grad(), at::full_like(tensor, 3).detach())) << name;
      storages.insert(tensor.grad().storage().unsafeGetStorageImpl());
      begins.insert(tensor.grad().data_ptr());
    }
    for (const auto& pack : optimizer.packs(0)) {
      const auto& first = parameters[std::stoul(pack.front())].second;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(first.grad().data_ptr()) % 64, 0u);
    }
    EXPECT_EQ(storages.size(), 2u);
    EXPECT_GT(begins.size(), 250u);
  });
}

struct Deviation {
  std::string name;
  std::vector<std::vector<int>> use;  // by each rank, in the step that differs
  uint64_t all_reduces;  // in that step: 10 packs, the agreement, and the gradients reduced singly
};

class Fallback : public ::testing::TestWithParam<Deviation> {};

TEST_P(Fallback, ReducesSinglyForOneStepAndFormsNewPacks) {
  const auto& tested = GetParam();
  const int world = static_cast<int>(tested.use.size());
  for (const std::string method : {"mean", "sum"}) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      Many net;
      DistributedOptimizer optimizer(
          *net, group, sgd(0.001),
          {.reduce_method = method, .param_pack = true, .param_pack_thd = 59});
      const std::vector<std::vector<int>> usual(world, kForwards);
      for (int step = 0; step < 6; ++step) {
        const bool odd = step == 2;
        optimizer.zero_grad();
        group.reset_stats();
        const auto& use = odd || step == 4 ? tested.use : usual;
        optimizer.backward(net(input(step, rank), use[rank]).sum());
        if (step == 1) EXPECT_EQ(group.stats().all_reduce.calls, 11u);
        if (odd) EXPECT_EQ(group.stats().all_reduce.calls, tested.all_reduces);
        expect_gradients(net, expected_gradients(net, step, use, method == "mean" ? world : 1),
                         method + ", step " + std::to_string(step));
        optimizer.step();
        EXPECT_EQ(group.stats().bytes.calls, step == 1 ? 0u : 1u)
            << "new packs after step " << step;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Fallback,
    ::testing::Values(
        // All gradients arrive in reverse order: all 12 are reduced singly.
        Deviation{"another_order_everywhere", {kBackwards, kBackwards}, 11 + 12},
        Deviation{"another_order_on_rank_1", {kForwards, kBackwards, kForwards}, 11 + 12},
        // w19 arrives third. From its pack on there are 10 gradients; 9 if no rank has w19.
        Deviation{"one_missing_everywhere", {kWithout9, kWithout9}, 11 + 9},
        Deviation{"one_missing_on_rank_0", {kWithout9, kForwards}, 11 + 10},
        // w11 is in the last pack.
        Deviation{
            "late_one_missing_on_rank_1", {kForwards, kWithout1, kForwards, kForwards}, 11 + 2},
        Deviation{"different_ones_missing", {kWithout1, kWithout9}, 11 + 10}),
    [](const auto& tested) { return tested.param.name; });

TEST(DistributedOptimizerTest, ALossThatUsesNoParameterDoesNotBlockTheOtherRanks) {
  for (const bool pack : {false, true}) {
    run_ranks(2, [&](ProcessGroup group, int rank) {
      Many net;
      DistributedOptimizer optimizer(*net, group, sgd(0.01),
                                     {.reduce_method = "mean", .param_pack = pack});
      const std::vector<std::vector<int>> usual{kForwards, kForwards}, half{kForwards, {}};
      for (int step = 0; step < 4; ++step) {
        const auto& use = step == 2 ? half : usual;
        optimizer.zero_grad();
        auto x = input(step, rank).requires_grad_();
        optimizer.backward(net(x, use[rank]).sum());
        expect_gradients(net, expected_gradients(net, step, use, 2),
                         "step " + std::to_string(step));
        optimizer.step();
      }
    });
  }
}

TEST(DistributedOptimizerTest, EachGroupHasItsOwnPacksAndAGroupOfOneRankIsNotReduced) {
  run_ranks(3, [](ProcessGroup group, int rank) {
    auto first = group.split(0), second = group.split(0);
    Many a, b, c;
    const auto named = [](const std::string& prefix, const Many& net) {
      NamedParameters result;
      for (const auto& [name, tensor] : named_parameters(*net))
        result.emplace_back(prefix + name, tensor);
      return result;
    };
    {
      torch::NoGradGuard no_grad;
      for (auto& weight : c->weights) weight.add_(rank);
    }
    DistributedOptimizer optimizer(
        {{named("a.", a), {{"lr", 0.02}}, first},
         {named("b.", b), {}, second},
         {named("c.", c), {}, ProcessGroup()}},
        sgd(0.01), {.reduce_method = "mean", .param_pack = true, .param_pack_thd = 59});
    EXPECT_FLOAT_EQ(c->weights[0][0].item<float>(), 0.1f + rank) << "not broadcast";
    const std::vector<std::vector<int>> usual(3, kForwards), backwards(3, kBackwards);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      first->reset_stats();
      second->reset_stats();
      // On rank 1 the gradients of the two groups arrive in the other order.
      auto ya = a(input(step, rank), kForwards),
           yb = b(input(step, rank), step == 2 ? std::vector<int>{} : kBackwards);
      auto yc = c(input(step, rank), kForwards);
      optimizer.backward(rank == 1 ? (yb + ya + yc).sum() : (ya + yb + yc).sum());
      expect_gradients(a, expected_gradients(a, step, usual, 3), "a");
      expect_gradients(
          b, step == 2 ? std::vector<at::Tensor>(12) : expected_gradients(b, step, backwards, 3),
          "b");
      Many own;
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < 12; ++i) own->weights[i].copy_(c->weights[i]);
      at::AutoGradMode with_grad(true);
      own(input(step, rank), kForwards).sum().backward();
      for (size_t i = 0; i < 12; ++i)
        EXPECT_TRUE(at::equal(own->weights[i].grad(), c->weights[i].grad())) << "not reduced";
      if (step > 0)
        EXPECT_EQ(first->stats().all_reduce.calls, 11u) << "b's deviation must not affect a";
      if (step == 1)
        EXPECT_EQ(second->stats().all_reduce.calls, 12u)
            << "w20 and w21 are above the threshold alone";
      optimizer.step();
    }
    EXPECT_EQ(optimizer.packs(0).front().front(), "a.w21");
    EXPECT_EQ(optimizer.packs(1).front().front(), "b.w10");
    EXPECT_TRUE(optimizer.packs(2).empty());
  });
}

TEST(DistributedOptimizerTest, NoSyncAccumulatesWithoutTraffic) {
  for (const bool pack : {false, true}) {
    run_ranks(2, [&](ProcessGroup group, int rank) {
      Many net;
      DistributedOptimizer optimizer(
          *net, group, sgd(0.01),
          {.reduce_method = "mean", .param_pack = pack, .param_pack_thd = 59});
      optimizer.backward(net(input(0, rank), kForwards).sum());
      optimizer.step();
      optimizer.zero_grad();
      const std::vector<std::vector<int>> usual{kForwards, kForwards};
      const auto one = expected_gradients(net, 1, usual, 2),
                 two = expected_gradients(net, 2, usual, 2);
      {
        auto scope = optimizer.no_sync();
        const auto before = group.stats().calls();
        optimizer.backward(net(input(1, rank), kForwards).sum());
        EXPECT_EQ(group.stats().calls(), before);
      }
      optimizer.backward(net(input(2, rank), kForwards).sum());
      std::vector<at::Tensor> sum;
      for (size_t i = 0; i < 12; ++i) sum.push_back(one[i] + two[i]);
      expect_gradients(net, sum, pack ? "packed" : "single");
    });
  }
}

TEST(DistributedOptimizerTest, TheStateIsThePlainOptimizersWithoutPacks) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(3), other = seeded<Uneven>(3);
    const Options options{.reduce_method = "mean", .param_pack = true};
    DistributedOptimizer optimizer(*net, group, adamw_factory(), options);
    const auto train = [&](Uneven& model, DistributedOptimizer& with, int from, int to) {
      for (int step = from; step < to; ++step) {
        with.zero_grad();
        with.backward(loss_of(model(rows(step, rank, 2))));
        with.step();
      }
    };
    train(net, optimizer, 0, 3);
    const auto state = optimizer.state_dict();
    ASSERT_EQ(state.groups.size(), 1u);
    EXPECT_EQ(state.state.size(), net->parameters().size());
    for (const auto& [name, entry] : state.state)
      EXPECT_EQ(entry.tensors.count("exp_avg"), 1u) << name;

    auto plain = adamw(other->parameters());
    load_state_dict(*plain, named_parameters(*other), state);
    {
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < net->parameters().size(); ++i)
        other->parameters()[i].copy_(net->parameters()[i]);
    }
    std::shared_ptr<torch::optim::Optimizer> shared = std::move(plain);
    DistributedOptimizer resumed(shared, named_parameters(*other), {group}, options);
    EXPECT_EQ(&resumed.optimizer(), shared.get());
    train(net, optimizer, 3, 6);
    train(other, resumed, 3, 6);
    for (size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(at::equal(net->parameters()[i], other->parameters()[i]));
    resumed.load_state_dict(state);
    EXPECT_TRUE(at::equal(resumed.state_dict().state.at("scale").tensors.at("exp_avg"),
                          state.state.at("scale").tensors.at("exp_avg")));
  });
}

TEST(DistributedOptimizerTest, ASchedulerChangesTheRateOfTheWrappedOptimizer) {
  Many net;
  DistributedOptimizer optimizer(*net, ProcessGroup(), sgd(0.1), {});
  torch::optim::StepLR scheduler(optimizer.optimizer(), 1, 0.5);
  scheduler.step();
  scheduler.step();
  EXPECT_NEAR(optimizer.optimizer().param_groups()[0].options().get_lr(), 0.05, 1e-12);
}

TEST(DistributedOptimizerTest, TheFirstDifferenceBetweenModelsOrOptionsIsNamed) {
  const auto models = run_ranks_catching(3, [](ProcessGroup group, int rank) {
    torch::nn::Linear net(3, rank == 2 ? 5 : 4);
    DistributedOptimizer optimizer(*net, group, sgd(0.1), {.reduce_method = "mean"});
  });
  for (const auto& error : models)
    EXPECT_THAT(message_of(error),
                HasSubstr("DistributedOptimizer: the ranks differ: entry 0 is 'weight Float ["));
  const auto options = run_ranks_catching(2, [](ProcessGroup group, int rank) {
    Many net;
    DistributedOptimizer optimizer(*net, group, sgd(0.1),
                                   {.reduce_method = rank == 0 ? "mean" : "sum"});
  });
  for (const auto& error : options) EXPECT_THAT(message_of(error), HasSubstr("reduce_method sum"));
}

TEST(DistributedOptimizerTest, FrozenParametersAreBroadcastButNotReduced) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1 + rank);
    net->second->weight.requires_grad_(false);
    DistributedOptimizer optimizer(*net, group, adamw_factory(), {.reduce_method = "mean"});
    EXPECT_TRUE(at::equal(net->second->weight, seeded<Uneven>(1)->second->weight));
    optimizer.backward(loss_of(net(rows(0))));
    optimizer.step();
    EXPECT_TRUE(at::equal(net->second->weight, seeded<Uneven>(1)->second->weight));
  });
}

// Thawed before loss.backward(), so that step() finds it, or before backward().
TEST(DistributedOptimizerTest, ThawedParametersEqualPlainTraining) {
  for (int world = 1; world <= 4; ++world) {
    for (const bool packs : {false, true}) {
      for (const bool direct : {false, true}) {
        const auto change = [](Uneven& net, int step) {
          if (step == 0) net->second->weight.requires_grad_(false);
          if (step == 0) net->first->weight.requires_grad_(false);
          if (step == 2) net->second->weight.requires_grad_(true);
          if (step == 4) net->first->weight.requires_grad_(true);
          if (step == 5) net->second->weight.requires_grad_(false);
          if (step == 7) net->second->weight.requires_grad_(true);
        };
        const auto plain = seeded<Uneven>(1);
        auto expected = plain;
        auto reference = adamw(plain->parameters());
        for (int step = 0; step < 9; ++step) {
          change(expected, step);
          clear_gradients(plain->parameters());
          for (int rank = 0; rank < world; ++rank)
            (loss_of(expected(rows(step, rank, world))) / world).backward();
          reference->step();
        }
        run_ranks(world, [&](ProcessGroup group, int rank) {
          auto net = seeded<Uneven>(1);
          change(net, 0);
          DistributedOptimizer optimizer(
              *net, group, adamw_factory(),
              {.reduce_method = "mean", .param_pack = packs, .param_pack_thd = 59});
          for (int step = 0; step < 9; ++step) {
            change(net, step);
            optimizer.zero_grad();
            const auto loss = loss_of(net(rows(step, rank, world)));
            if (direct) loss.backward();
            else optimizer.backward(loss);
            optimizer.step();
          }
          expect_close(net->parameters(), plain->parameters(), std::to_string(world));
        });
      }
    }
  }
}

// Nothing has hooks, so gradients would be each rank's own until step(), and clipped by its norm.
TEST(DistributedOptimizerTest, AThawOfEverythingNeedsBackwardOfTheWrapper) {
  for (const bool clips : {false, true}) {
    for (const bool direct : {false, true}) {
      std::vector<at::Tensor> trained;
      const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(1);
        for (auto& parameter : net->parameters()) parameter.requires_grad_(false);
        DistributedOptimizer optimizer(*net, group, sgd(0.1), {.reduce_method = "mean"});
        for (auto& parameter : net->parameters()) parameter.requires_grad_(true);
        const auto loss = loss_of(net(rows(0, rank, 2)));
        if (direct) loss.backward();
        else optimizer.backward(loss);
        if (clips) torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01);
        optimizer.step();
        if (rank == 0) trained = copies(net->parameters());
      });
      if (direct) {
        expect_usage_errors(errors, "expected DistributedOptimizer::backward(loss)");
        continue;
      }
      for (const auto& error : errors) ASSERT_EQ(error, nullptr);
      auto plain = seeded<Uneven>(1);
      for (int rank = 0; rank < 2; ++rank) (loss_of(plain(rows(0, rank, 2))) / 2).backward();
      if (clips) torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.01);
      const torch::NoGradGuard no_grad;
      for (auto& parameter : plain->parameters()) parameter.sub_(parameter.grad(), 0.1);
      expect_close(trained, plain->parameters(), clips ? "clipped" : "");
    }
  }
}

TEST(DistributedOptimizerTest, ThawedParametersOfOtherNamesAreAnErrorOnAllRanks) {
  const auto errors = run_ranks_catching(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    net->second->weight.requires_grad_(false);
    net->last->weight.requires_grad_(false);
    DistributedOptimizer optimizer(*net, group, adamw_factory(), {.reduce_method = "mean"});
    (rank == 0 ? net->second : net->last)->weight.requires_grad_(true);
    optimizer.backward(loss_of(net(rows(0))));
  });
  expect_usage_errors(errors, "a change of requires_grad");
  expect_usage_errors(errors, "second.weight");
}

TEST(DistributedOptimizerTest, AGroupOfFrozenParametersBesideATrainableOneIsBroadcastOnly) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto frozen = seeded<Uneven>(1 + rank);
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
    Many trained;
    DistributedOptimizer optimizer(
        {{named_parameters(*frozen), {}, group}, {named_parameters(*trained), {}, group}},
        sgd(0.01), {.reduce_method = "mean", .param_pack = true, .param_pack_thd = 59});
    expect_same_weights(frozen, seeded<Uneven>(1));
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      optimizer.backward(trained(input(step, rank), kForwards).sum());
      expect_gradients(trained, expected_gradients(trained, step, {kForwards, kForwards}, 2),
                       "step " + std::to_string(step));
      optimizer.step();
    }
    EXPECT_TRUE(optimizer.packs(0).empty());
    EXPECT_EQ(optimizer.packs(1).size(), 10u);
  });
}

}  // namespace
