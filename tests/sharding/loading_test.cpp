// What every wrapper loads: states without names, states that do not fit, a rank's part of a state;
// and the group that it takes where none is given.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adam.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/module_state_dict.h"
#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

OptimizerFactory adam(double lr = 0.1) {
  return default_optimizers().factory("Adam", {{"lr", lr}});
}

void expect_equal(const OptimizerStateDict& a, const OptimizerStateDict& b) {
  ASSERT_EQ(a.state.size(), b.state.size());
  for (const auto& [name, state] : a.state)
    for (const auto& [key, tensor] : state.tensors)
      EXPECT_TRUE(at::equal(tensor, b.state.at(name).tensors.at(key))) << name << " " << key;
}

TEST(DefaultGroup, AWrapperWithoutAGroupTakesIt) {
  auto a = seeded<Uneven>(1), b = seeded<Uneven>(1), c = seeded<Uneven>(1), d = seeded<Uneven>(1),
       e = seeded<Uneven>(1), f = seeded<Uneven>(1);
  const auto groups_of = [](const Uneven& net) {
    return std::vector<ZeroRedundancyOptimizer::Group>{{named_parameters(*net), {}}};
  };
  {
    const auto world = init_process_group();
    DistributedDataParallel ddp(a);
    ZeroRedundancyOptimizer zero(*b, adam());
    DistributedOptimizer distributed(*c, adam(), {});
    FullyShardedDataParallel fsdp(d);
    ZeroRedundancyOptimizer groups(groups_of(e), adam(), {.buffers = BufferSync::none});
    ZeroRedundancyOptimizer with_module(*f, groups_of(f), adam());
    EXPECT_EQ(groups.join_group().impl(), world.impl());
    EXPECT_EQ(with_module.join_group().impl(), world.impl());
    EXPECT_EQ(ddp.join_group().impl(), world.impl());
    EXPECT_EQ(zero.join_group().impl(), world.impl());
    EXPECT_EQ(distributed.join_group().impl(), world.impl());
    EXPECT_EQ(fsdp.join_group().impl(), world.impl());
  }
  auto net = seeded<Uneven>(1);
  const std::string text = "no group is given, and this process has no world";
  EXPECT_THAT(thrown_by([&] { DistributedDataParallel ddp(net); }), HasSubstr(text));
  EXPECT_THAT(thrown_by([&] { FullyShardedDataParallel fsdp(net); }), HasSubstr(text));
  EXPECT_THAT(thrown_by([&] { ZeroRedundancyOptimizer zero(*net, adam()); }), HasSubstr(text));
  EXPECT_THAT(thrown_by([&] { ZeroRedundancyOptimizer zero(groups_of(net), adam()); }),
              HasSubstr(text));
  EXPECT_THAT(thrown_by([&] { ZeroRedundancyOptimizer zero(*net, groups_of(net), adam()); }),
              HasSubstr(text));
  EXPECT_THAT(thrown_by([&] { DistributedOptimizer distributed(*net, adam(), {}); }),
              HasSubstr("this process has no world of init_process_group()"));
}

TEST(StateWithoutNames, GoesFromAPlainOptimizerToZeroAndBack) {
  auto plain_net = seeded<Uneven>(1);
  torch::optim::Adam plain(plain_net->parameters(), torch::optim::AdamOptions(0.1));
  loss_of(plain_net(rows(0, 0, 1))).backward();
  plain.step();
  const auto numbered = state_dict(plain);
  EXPECT_EQ(numbered.groups.at(0).parameters.front(), "0");
  EXPECT_EQ(numbered.state.size(), plain_net->parameters().size());
  for (const int world : {1, 2, 3}) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      ZeroRedundancyOptimizer zero({{numbered_parameters(net->parameters()), {}}}, group, adam());
      zero.load_state_dict(numbered);
      zero.consolidate_state_dict(-1);
      expect_equal(numbered, zero.state_dict());
      auto back_net = seeded<Uneven>(1);
      torch::optim::Adam back(back_net->parameters(), torch::optim::AdamOptions(0.3));
      load_state_dict(back, zero.state_dict());
      expect_equal(numbered, state_dict(back));
      EXPECT_EQ(back.param_groups()[0].options().get_lr(), 0.1);
      (void)rank;
    });
  }
}

/// The state of Adam over Uneven after one step, by name.
OptimizerStateDict full_state() {
  auto net = seeded<Uneven>(1);
  torch::optim::Adam plain(net->parameters(), torch::optim::AdamOptions(0.25));
  loss_of(net(rows(0, 0, 1))).backward();
  plain.step();
  return state_dict(plain, named_parameters(*net));
}

/// The same without its first parameter, and with an unknown one.
OptimizerStateDict other_state(std::string& removed) {
  auto dict = full_state();
  auto& names = dict.groups.at(0).parameters;
  removed = names.front();
  names.front() = "unknown";
  dict.state["unknown"] = dict.state.at(removed);
  dict.state.erase(removed);
  return dict;
}

TEST(LoadingNotStrictly, TakesTheStateOfKnownParametersUnderEveryWrapper) {
  std::string removed;
  const auto dict = other_state(removed);
  auto expected = dict;
  expected.state.erase("unknown");
  for (const int world : {1, 2, 3}) {
    run_ranks(world, [&](ProcessGroup group, int) {
      auto net = seeded<Uneven>(1);
      ZeroRedundancyOptimizer zero(*net, group, adam());
      EXPECT_THAT(thrown_by([&] { zero.load_state_dict(dict); }), HasSubstr("unknown"));
      zero.load_state_dict(dict, false);
      zero.consolidate_state_dict(-1);
      expect_equal(expected, zero.state_dict());
      EXPECT_EQ(zero.param_groups()[0].options().get_lr(), 0.25);

      auto distributed_net = seeded<Uneven>(1);
      DistributedOptimizer distributed(*distributed_net, group, adam(), {.reduce_method = "mean"});
      EXPECT_THAT(thrown_by([&] { distributed.load_state_dict(dict); }), HasSubstr("unknown"));
      distributed.load_state_dict(dict, false);
      expect_equal(expected, distributed.state_dict());

      auto sharded = seeded<Uneven>(1);
      FullyShardedDataParallel fsdp(sharded, group);
      torch::optim::Adam optimizer(fsdp.parameters(), torch::optim::AdamOptions(0.1));
      EXPECT_THAT(thrown_by([&] { fsdp.load_optim_state_dict(optimizer, dict); }),
                  HasSubstr("unknown"));
      fsdp.load_optim_state_dict(optimizer, dict, false);
      expect_equal(expected, fsdp.optim_state_dict(optimizer, -1));
    });
  }
}

TEST(LoadingNotStrictly, AGroupWithNoKnownParameterKeepsItsOptions) {
  auto net = seeded<Uneven>(1);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.5));
  load_state_dict(optimizer, named_parameters(*net), OptimizerStateDict{}, false);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.5);
  EXPECT_TRUE(state_dict(optimizer).state.empty());
}

TEST(LoadingAState, OfAnotherShapeIsRefusedAndChangesNothing) {
  const auto adam_of = [](at::IntArrayRef shape) {
    auto parameter = at::ones(shape).requires_grad_();
    parameter.mutable_grad() = at::ones(shape);
    return torch::optim::Adam({parameter}, torch::optim::AdamOptions(0.1));
  };
  const std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> pairs{
      {{10}, {5}}, {{2, 3}, {3, 2}}, {{6}, {2, 3}}, {{4, 3}, {3, 2}}};
  for (const auto& [from, to] : pairs) {
    auto saved = adam_of(from), loading = adam_of(to);
    saved.param_groups()[0].options().set_lr(0.5);
    saved.step();
    for (const bool strict : {true, false})
      EXPECT_THAT(thrown_by([&] { load_state_dict(loading, state_dict(saved), strict); }),
                  HasSubstr("exp_avg of parameter 0 has shape " + c10::str(at::IntArrayRef(from)) +
                            "; expected " + c10::str(at::IntArrayRef(to))));
    EXPECT_EQ(loading.param_groups()[0].options().get_lr(), 0.1);
    EXPECT_TRUE(state_dict(loading).state.empty());
  }
}

TEST(LoadingNotStrictly, WeightsThatAreMissingKeepTheirValues) {
  auto state = state_dict(*seeded<Uneven>(2));
  const std::string missing = state.front().first;
  state.front().first = "unknown";
  for (const int world : {1, 2, 3}) {
    run_ranks(world, [&](ProcessGroup group, int) {
      auto plain = seeded<Uneven>(1);
      EXPECT_THAT(thrown_by([&] { load_state_dict(*plain, state); }), HasSubstr("unknown"));
      const auto unmatched = load_state_dict(*plain, state, false);
      EXPECT_THAT(unmatched.missing, ElementsAre(missing));
      EXPECT_THAT(unmatched.unexpected, ElementsAre("unknown"));
      const auto expected = state_dict(*plain);

      auto net = seeded<Uneven>(1);
      FullyShardedDataParallel fsdp(net, group);
      EXPECT_THAT(thrown_by([&] { fsdp.load_state_dict(state); }), HasSubstr("unknown"));
      EXPECT_THAT(fsdp.load_state_dict(state, false).missing, ElementsAre(missing));
      const auto loaded = fsdp.state_dict(-1);
      ASSERT_EQ(loaded.size(), expected.size());
      for (size_t i = 0; i < loaded.size(); ++i)
        EXPECT_TRUE(at::equal(loaded[i].second, expected[i].second)) << expected[i].first;
    });
  }
}

TEST(RankLocalState, OfAnotherRankIsWhatThatRankHas) {
  for (const auto kind : {Partition::flat, Partition::whole}) {
    for (const int world : {1, 2, 3, 4}) {
      std::vector<OptimizerStateDict> own(static_cast<size_t>(world)), cut(own.size());
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(1);
        {  // another memory order
          const torch::NoGradGuard no_grad;
          auto weight = net->parameters().front();
          if (weight.dim() == 2) weight.set_data(weight.detach().t().contiguous().t());
        }
        ZeroRedundancyOptimizer zero(*net, group, adam(), {.partition = kind});
        if (world > 1 && rank != 0) {
          EXPECT_THAT(thrown_by([&] { zero.rank_local_state_dict(0); }),
                      HasSubstr("call consolidate_state_dict(to)"));
        }
        loss_of(net(rows(0, rank, world))).backward();
        zero.step();
        zero.consolidate_state_dict(0);
        const auto local = zero.rank_local_state_dict();
        for (const auto& [name, state] : local.state)
          for (const auto& [key, tensor] : state.tensors)
            own[static_cast<size_t>(rank)].state[name].tensors[key] = tensor.clone();
        if (rank == 0)
          for (int other = 0; other < world; ++other)
            cut[static_cast<size_t>(other)] = zero.rank_local_state_dict(other);
        EXPECT_THAT(thrown_by([&] { zero.rank_local_state_dict(world); }),
                    HasSubstr("expected 0 to " + std::to_string(world - 1)));
      });
      for (size_t rank = 0; rank < own.size(); ++rank) expect_equal(own[rank], cut[rank]);
    }
  }
}

TEST(WrapBySize, LeavesContainersOut) {
  const auto policy = wrap_by_size(10);
  torch::nn::ModuleListImpl list;
  torch::nn::ModuleDictImpl dict;
  torch::nn::LinearImpl linear(3, 4);
  EXPECT_FALSE(policy(list, "list", 100));
  EXPECT_FALSE(policy(dict, "dict", 100));
  EXPECT_TRUE(policy(linear, "linear", 16));
  EXPECT_FALSE(policy(linear, "linear", 9));
}

}  // namespace
}  // namespace tessera::testing
