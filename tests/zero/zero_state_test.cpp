#include "zero/zero_harness.h"

// State dicts: between world sizes, partitions, and the plain optimizer, bit by bit.

namespace {

using namespace tessera;
using namespace tessera::testing;

void expect_equal(const OptimizerStateDict& a, const OptimizerStateDict& b) {
  ASSERT_EQ(a.groups.size(), b.groups.size());
  for (size_t g = 0; g < a.groups.size(); ++g) {
    EXPECT_EQ(a.groups[g].parameters, b.groups[g].parameters);
    EXPECT_EQ(a.groups[g].options, b.groups[g].options);
  }
  ASSERT_EQ(a.state.size(), b.state.size());
  for (const auto& [name, state] : a.state) {
    ASSERT_TRUE(b.state.count(name)) << name;
    const auto& other = b.state.at(name);
    EXPECT_EQ(state.scalars, other.scalars) << name;
    ASSERT_EQ(state.tensors.size(), other.tensors.size()) << name;
    for (const auto& [key, tensor] : state.tensors)
      EXPECT_TRUE(at::equal(tensor, other.tensors.at(key))) << name << "." << key;
  }
}

/// All ranks train on the same rows, so that every world size computes the same gradients up to
/// averaging of equal numbers.
template <class Net, class Input>
OptimizerStateDict train_sharded(int world, Partition partition, const std::string& name,
                                 const Input& input, const OptimizerStateDict* start, int steps,
                                 std::vector<at::Tensor>* weights = nullptr) {
  OptimizerStateDict result;
  run_ranks(world, [&](ProcessGroup group, int rank) {
    auto net = seeded<Net>(11);
    Zero zero(*net, group, factory(name), {.partition = partition});
    if (start) zero.load_state_dict(*start);
    for (int step = 0; step < steps; ++step) {
      loss_of(net(input(step))).backward();
      zero.step();
      zero.zero_grad();
    }
    zero.consolidate_state_dict(world - 1);
    if (rank == world - 1) {
      result = zero.state_dict();
      if (weights) *weights = copies(net->parameters());
    } else {
      EXPECT_THROW(zero.state_dict(), UsageError);
    }
  });
  return result;
}

const auto same_rows = [](int step) { return rows(step); };
const auto same_images = [](int step) { return images(step); };

template <class Net, class Input>
OptimizerStateDict train_plain(const std::string& name, const Input& input,
                               const OptimizerStateDict* start, int steps) {
  auto net = seeded<Net>(11);
  const auto optimizer = factory(name)({torch::optim::OptimizerParamGroup(net->parameters())});
  if (start) load_state_dict(*optimizer, named_parameters(*net), *start);
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    loss_of(net(input(step))).backward();
    optimizer->step();
  }
  return state_dict(*optimizer, named_parameters(*net));
}

class ZeroState : public ::testing::TestWithParam<Partition> {};

TEST_P(ZeroState, EqualsThePlainOptimizersAndGoesBothWays) {
  for (const std::string name : {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop"}) {
    const auto plain = train_plain<Uneven>(name, same_rows, nullptr, 3);
    for (const int world : {1, 2, 4}) {  // means over these are exact
      expect_equal(train_sharded<Uneven>(world, GetParam(), name, same_rows, nullptr, 3), plain);
      const auto onwards = train_sharded<Uneven>(world, GetParam(), name, same_rows, &plain, 2);
      expect_equal(onwards, train_plain<Uneven>(name, same_rows, &plain, 2));
    }
  }
}

TEST_P(ZeroState, AcrossWorldSizesNothingChanges) {
  const auto four = train_sharded<Uneven>(4, GetParam(), "AdamW", same_rows, nullptr, 3);
  const auto two = train_sharded<Uneven>(2, GetParam(), "AdamW", same_rows, &four, 0);
  expect_equal(two, four);
  expect_equal(train_sharded<Uneven>(3, GetParam(), "AdamW", same_rows, &two, 0), four);
}

TEST_P(ZeroState, ShapesAndDtypesSurvive) {
  const auto plain = train_plain<Mixed>("AdamW", same_images, nullptr, 2);
  EXPECT_EQ(plain.state.at("conv.weight").tensors.at("exp_avg").sizes(),
            (std::vector<int64_t>{5, 2, 3, 3}));
  const auto sharded = train_sharded<Mixed>(2, GetParam(), "AdamW", same_images, &plain, 0);
  expect_equal(sharded, plain);
}

INSTANTIATE_TEST_SUITE_P(All, ZeroState,
                         ::testing::Values(Partition::flat, Partition::whole, Partition::first_fit),
                         [](const auto& tested) { return partition_name(tested.param); });

TEST(ZeroState, LoadingLeavesTheCallersCopyAndTakesItsOptions) {
  auto dict = train_plain<Uneven>("AdamW", same_rows, nullptr, 1);
  dict.groups[0].options["lr"] = 0.125;
  const auto before = dict.state.at("second.weight").tensors.at("exp_avg").clone();
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(11);
    Zero zero(*net, group, factory("AdamW"));
    zero.load_state_dict(dict);
    EXPECT_DOUBLE_EQ(zero.param_groups()[0].options().get_lr(), 0.125);
    loss_of(net(rows(0))).backward();
    zero.step();
  });
  EXPECT_TRUE(at::equal(dict.state.at("second.weight").tensors.at("exp_avg"), before));
}

TEST(ZeroState, LoadingForgetsWhatTheLoadedOneLacks) {
  const auto fresh = train_plain<Uneven>("AdamW", same_rows, nullptr, 0);
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(11);
    Zero zero(*net, group, factory("AdamW"));
    loss_of(net(rows(0))).backward();
    zero.step();
    zero.load_state_dict(fresh);
    zero.consolidate_state_dict(-1);
    EXPECT_TRUE(zero.state_dict().state.empty());
  });
}

TEST(ZeroState, WhatDoesNotFitIsNamed) {
  const auto dict = train_plain<Uneven>("AdamW", same_rows, nullptr, 1);
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(11);
    Zero zero(*net, group, factory("AdamW"));
    const auto refused = [&](const OptimizerStateDict& wrong, const std::string& words) {
      EXPECT_THAT(thrown_by([&] { zero.load_state_dict(wrong); }), ::testing::HasSubstr(words));
    };
    auto renamed = dict;
    renamed.groups[0].parameters[1] = "other";
    refused(renamed, "group 0, parameter 1: the optimizer has " + dict.groups[0].parameters[1] +
                         ", the state dict other");
    auto shorter = dict;
    shorter.groups[0].parameters.pop_back();
    refused(shorter,
            "the optimizer has " + dict.groups[0].parameters.back() + ", the state dict nothing");
    auto longer = dict;
    longer.groups[0].parameters.push_back("more");
    refused(longer, "the optimizer has nothing, the state dict more");
    auto unknown = dict;
    unknown.state["nowhere"] = unknown.state.begin()->second;
    refused(unknown, "unknown parameter nowhere");
    auto shape = dict;
    shape.state.at("last.weight").tensors["exp_avg"] = at::zeros({3, 3});
    refused(shape, "exp_avg of parameter last.weight has 9 elements; expected 14");
    auto groups = dict;
    groups.groups.push_back({});
    refused(groups, "2 parameter groups; expected 1");
    EXPECT_THROW(zero.consolidate_state_dict(2), UsageError);
  });
}

TEST(ZeroState, PerRankMemoryIsTheFormula) {
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      Zero zero(*net, group, factory("AdamW"));
      loss_of(net(rows(0, rank, world))).backward();
      zero.step();
      int64_t numel = 0;
      for (const auto& p : net->parameters()) numel += p.numel();
      const auto memory = zero.memory();
      EXPECT_EQ(memory.parameters, numel * 4);
      EXPECT_EQ(memory.gradients, numel * 4);
      EXPECT_LE(memory.optimizer_state, 2 * 4 * ((numel + world - 1) / world))
          << "two moments of its part, and nothing else";
    });
  }
}

}  // namespace
