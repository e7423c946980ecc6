// Optimizer state that is saved with one partition and loaded with another keeps every bit.

#include <cmath>
#include <limits>
#include <random>

#include "checkpoint/store_fixture.h"
#include "harness/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing;
using ::testing::HasSubstr;

struct Parameter {
  std::string name;
  std::vector<int64_t> shape;
  int64_t numel;
  bool stepped;
};

std::vector<Parameter> parameters() {
  std::vector<Parameter> list = {
      {"wte.weight", {7, 5}, 0, true},      {"bias", {13}, 0, true},  {"scale", {}, 0, true},
      {"never.stepped", {4, 4}, 0, false},  {"one", {1}, 0, true},    {"empty", {0, 3}, 0, true},
      {"block/0\"é.w", {2, 3, 4}, 0, true}, {"frozen", {3}, 0, false}};
  for (auto& each : list) each.numel = c10::multiply_integers(each.shape);
  return list;
}

/// State as an element-wise optimizer could have it: random bits with NaNs among them in several
/// dtypes, and a counter without dimensions.
ParamState whole_state(const Parameter& parameter, int seed) {
  if (!parameter.stepped) return {};
  at::manual_seed(seed);
  const auto bits = at::randint(std::numeric_limits<int>::min(), std::numeric_limits<int>::max(),
                                {parameter.numel}, at::kLong);
  ParamState state;
  state.tensors["exp_avg"] = bits.to(at::kInt).view(at::kFloat);
  state.tensors["exp_avg_sq"] = bits.mul(31).view(at::kDouble);
  state.tensors["half"] = bits.to(at::kShort).view(at::kBFloat16);
  state.tensors["step"] = at::scalar_tensor(seed, at::kLong);
  state.tensors["rows"] = at::arange(9, at::kFloat).view({3, 3});
  state.scalars = {{"step", int64_t{1} << 60},
                   {"decay", -0.0},
                   {"weird", std::numeric_limits<double>::quiet_NaN()},
                   {"third", 1.0 / 3}};
  return state;
}

bool follows(const std::string& name) {
  return name == "exp_avg" || name == "exp_avg_sq" || name == "half";
}

/// The range [begin, begin + numel) of the state, as a sharding wrapper has it.
StateSlice slice_of(const Parameter& parameter, const ParamState& whole, int64_t begin,
                    int64_t numel) {
  StateSlice slice{{parameter.name, parameter.shape, begin, numel}, {}};
  slice.state.scalars = whole.scalars;
  for (const auto& [name, tensor] : whole.tensors)
    slice.state.tensors[name] = follows(name) ? tensor.narrow(0, begin, numel).clone() : tensor;
  return slice;
}

/// A partition: for each rank, ranges of the parameters. Each parameter is divided at random
/// places, also into empty ranges.
std::vector<std::vector<ElementRange>> random_partition(int world, std::mt19937& random) {
  std::vector<std::vector<ElementRange>> ranks(world);
  for (const auto& parameter : parameters()) {
    std::vector<int64_t> cuts = {0, parameter.numel};
    for (int i = 1; i < world; ++i)
      cuts.push_back(std::uniform_int_distribution<int64_t>(0, parameter.numel)(random));
    std::sort(cuts.begin(), cuts.end());
    std::vector<int> order(world);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (int i = 0; i < world; ++i) {
      const int64_t numel = cuts[i + 1] - cuts[i];
      if (numel == 0 && parameter.numel > 0 && i % 2 == 0)
        continue;  // some ranks have an empty range, some have no range
      ranks[order[i]].push_back({parameter.name, parameter.shape, cuts[i], numel});
    }
  }
  return ranks;
}

const Parameter& named(const std::string& name) {
  static const auto list = parameters();
  return *std::find_if(list.begin(), list.end(),
                       [&](const auto& each) { return each.name == name; });
}

void expect_same(const StateSlice& loaded, const StateSlice& expected) {
  const std::string where = loaded.parameter + " from " + std::to_string(loaded.begin);
  ASSERT_EQ(loaded.parameter, expected.parameter);
  ASSERT_EQ(loaded.begin, expected.begin) << where;
  ASSERT_EQ(loaded.numel, expected.numel) << where;
  ASSERT_EQ(loaded.state.scalars.size(), expected.state.scalars.size()) << where;
  for (const auto& [name, value] : expected.state.scalars)
    EXPECT_TRUE(same_bits(loaded.state.scalars.at(name), value)) << where << " " << name;
  ASSERT_EQ(loaded.state.tensors.size(), expected.state.tensors.size()) << where;
  for (const auto& [name, tensor] : expected.state.tensors)
    EXPECT_TRUE(same_bits(loaded.state.tensors.at(name), tensor)) << where << " " << name;
}

class Slices : public StoreTest {
 protected:
  /// Saves slices given by rank.
  std::string save(const std::vector<std::vector<StateSlice>>& ranks, int64_t step = 1) {
    run_ranks(static_cast<int>(ranks.size()), [&](ProcessGroup group, int rank) {
      CheckpointStore store(run_, group);
      CheckpointWriter writer(store, step);
      writer.add_slices(ranks[rank]);
      writer.commit();
    });
    return *latest_checkpoint(run_);
  }
};

TEST_F(Slices, AnyPartitionIsLoadedInAnyOther) {
  std::mt19937 random(7);
  std::map<std::string, ParamState> whole;
  for (const auto& parameter : parameters())
    whole[parameter.name] = whole_state(parameter, 11 + static_cast<int>(whole.size()));
  int64_t step = 0;
  for (const int saved : {1, 2, 3, 4}) {
    std::vector<std::vector<StateSlice>> ranks;
    for (const auto& runs : random_partition(saved, random)) {
      auto& rank = ranks.emplace_back();
      for (const auto& run : runs)
        rank.push_back(slice_of(named(run.parameter), whole[run.parameter], run.begin, run.numel));
    }
    const Checkpoint checkpoint(save(ranks, ++step));
    checkpoint.verify();
    EXPECT_EQ(checkpoint.world_size(), saved);
    for (const int world : {1, 2, 3, 4}) {
      for (const auto& requests : random_partition(world, random)) {
        const auto loaded = checkpoint.load_slices(requests);
        ASSERT_EQ(loaded.size(), requests.size());
        for (size_t i = 0; i < loaded.size(); ++i) {
          const auto& run = requests[i];
          if (run.numel == 0 && named(run.parameter).numel > 0) continue;
          expect_same(loaded[i],
                      slice_of(named(run.parameter), whole[run.parameter], run.begin, run.numel));
        }
      }
    }
  }
}

TEST_F(Slices, TheSamePartitionGivesEachRankItsOwnSlices) {
  // Also if ranks contradict each other, because nothing is assembled.
  StateSlice left{{"w", {2, 3}, 0, 4}, {}}, right{{"w", {2, 3}, 4, 2}, {}};
  left.state.scalars["step"] = int64_t{3};
  left.state.tensors["m"] = at::arange(4.0);
  const Checkpoint checkpoint(save({{left}, {right}}));
  const auto loaded = checkpoint.load_slices({{"w", {2, 3}, 0, 4}, {"w", {2, 3}, 4, 2}});
  expect_same(loaded[0], left);
  EXPECT_TRUE(loaded[1].stateless());
  EXPECT_THAT(usage_error([&] {
                checkpoint.load_slices({{"w", {2, 3}, 2, 3}});
              }),
              ::testing::AllOf(HasSubstr("\"w\""), HasSubstr("never stepped")));
}

TEST_F(Slices, WholeTensorsOfAnyStridesAreTakenInMemoryOrder) {
  StateSlice whole{{"conv", {2, 3, 2, 2}, 0, 24}, {}};
  whole.state.tensors["m"] =
      at::arange(24.0).view({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto memory = whole.state.tensors["m"].as_strided({24}, {1}).clone();
  const Checkpoint checkpoint(save({{whole}}));
  const auto loaded =
      checkpoint.load_slices({{"conv", {2, 3, 2, 2}, 5, 9}, {"conv", {2, 3, 2, 2}, 0, 24}});
  EXPECT_TRUE(same_bits(loaded[0].state.tensors.at("m"), memory.narrow(0, 5, 9)));
  EXPECT_TRUE(same_bits(loaded[1].state.tensors.at("m"), memory));
}

/// The slices of a weight whose elements are 0, 1, 2 … in logical order, cut into `ranks` ranges of
/// its memory order.
std::vector<std::vector<StateSlice>> slices_of(const at::Tensor& weight, int ranks, bool stated) {
  std::vector<std::vector<StateSlice>> result(ranks);
  const auto run = weight.as_strided({weight.numel()}, {1});
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t begin = weight.numel() * rank / ranks, end = weight.numel() * (rank + 1) / ranks;
    StateSlice slice{{"conv", weight.sizes().vec(), begin, end - begin}, {}};
    if (stated) slice.strides = memory_strides(weight);
    slice.state.tensors["m"] = run.narrow(0, begin, end - begin);
    slice.state.tensors["step"] = at::scalar_tensor(3.0);
    result[rank].push_back(std::move(slice));
  }
  return result;
}

TEST_F(Slices, GoToTheMemoryOrderOfTheRequest) {
  const auto contiguous = at::arange(24.0).view({2, 3, 2, 2});
  const auto channels_last = contiguous.contiguous(at::MemoryFormat::ChannelsLast);
  const auto permuted = contiguous.permute({3, 1, 0, 2}).contiguous().permute({2, 1, 3, 0});
  int64_t step = 0;
  for (const auto& saved : {contiguous, channels_last, permuted}) {
    for (const auto& wanted : {contiguous, channels_last, permuted}) {
      for (const int ranks : {1, 2, 3}) {
        const Checkpoint checkpoint(save(slices_of(saved, ranks, true), ++step));
        for (const int other : {1, 2, 4}) {
          for (const auto& expected : slices_of(wanted, other, true)) {
            const auto loaded = checkpoint.load_slices({expected[0]});
            expect_same(loaded[0], expected[0]);
            EXPECT_EQ(loaded[0].strides, expected[0].strides);
          }
        }
      }
    }
  }
}

TEST_F(Slices, WithoutStridesStayInTheOrderInWhichTheyWereSaved) {
  const auto saved = at::arange(24.0).view({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto wanted = saved.contiguous();
  const auto memory = saved.as_strided({24}, {1});
  const Checkpoint old(save(slices_of(saved, 2, false), 1));
  const auto request = slices_of(wanted, 1, true)[0][0];
  const auto from_old = old.load_slices({request})[0];
  EXPECT_TRUE(same_bits(from_old.state.tensors.at("m"), memory));
  EXPECT_TRUE(from_old.strides.empty());
  const Checkpoint stated(save(slices_of(saved, 2, true), 2));
  const auto unstated = stated.load_slices({{"conv", {2, 3, 2, 2}, 0, 24}})[0];
  EXPECT_TRUE(same_bits(unstated.state.tensors.at("m"), memory));
  EXPECT_EQ(unstated.strides, memory_strides(saved));
}

TEST_F(Slices, StridesThatContradictOrDoNotFitAreErrors) {
  const auto weight = at::arange(24.0).view({2, 3, 2, 2});
  const auto other = weight.contiguous(at::MemoryFormat::ChannelsLast);
  auto mixed = slices_of(weight, 2, true);
  mixed[1] = slices_of(other, 2, true)[1];
  const Checkpoint checkpoint(save(mixed));
  EXPECT_THAT(usage_error([&] { checkpoint.load_slices({slices_of(weight, 1, true)[0][0]}); }),
              ::testing::AllOf(HasSubstr("\"conv\""), HasSubstr("contradict each other: strides")));
  auto broken = slices_of(weight, 1, true)[0][0];
  broken.strides = {12, 4, 2, 2};
  EXPECT_THAT(usage_error([&] { checkpoint.load_slices({broken}); }),
              HasSubstr("strides [12, 4, 2, 2] do not fit shape [2, 3, 2, 2]"));
}

TEST_F(Slices, ATensorOfOneElementIsKeptWholeWhenAnotherSliceShowsIt) {
  const auto part = [](int64_t begin, int64_t numel) {
    StateSlice slice{{"w", {5}, begin, numel}, {}};
    slice.state.tensors["count"] = at::full({1}, 8.0);
    slice.state.tensors["m"] = at::arange(begin, begin + numel, at::kFloat);
    return slice;
  };
  const Checkpoint checkpoint(save({{part(0, 1)}, {part(1, 4)}}));
  const auto loaded =
      checkpoint.load_slices({{"w", {5}, 0, 5}, {"w", {5}, 0, 3}, {"w", {5}, 0, 1}});
  for (const auto& slice : loaded) {
    EXPECT_TRUE(same_bits(slice.state.tensors.at("count"), at::full({1}, 8.0)));
    EXPECT_TRUE(same_bits(slice.state.tensors.at("m"), at::arange(0, slice.numel, at::kFloat)));
  }
}

TEST_F(Slices, AnErrorNamesTheParameter) {
  const auto part = [](const std::string& name, int64_t begin, int64_t numel, int64_t step,
                       at::ScalarType dtype = at::kFloat) {
    StateSlice slice{{name, {10}, begin, numel}, {}};
    slice.state.scalars["step"] = step;
    slice.state.tensors["m"] = at::zeros({numel}, dtype);
    return slice;
  };
  auto renamed = part("names", 5, 5, 1);
  renamed.state.tensors["v"] = at::zeros({5});
  auto counted = part("count", 0, 5, 1), counted_more = part("count", 5, 5, 1);
  counted.state.tensors["n"] = at::scalar_tensor(1);
  counted_more.state.tensors["n"] = at::scalar_tensor(2);
  const Checkpoint checkpoint(save({{part("gap", 0, 3, 1), part("step", 0, 5, 1),
                                     part("dtype", 0, 5, 1), part("names", 0, 5, 1), counted},
                                    {part("gap", 5, 5, 1), part("step", 5, 5, 2),
                                     part("dtype", 5, 5, 1, at::kDouble), renamed, counted_more}}));
  const auto text = [&](const ElementRange& request) {
    const auto message = usage_error([&] { checkpoint.load_slices({request}); });
    EXPECT_THAT(message, HasSubstr("\"" + request.parameter + "\""));
    EXPECT_THAT(message, HasSubstr(run_ + "/step-00000001"));
    return message;
  };
  EXPECT_THAT(text({"gap", {10}, 1, 6}), HasSubstr("no rank saved its element 3"));
  EXPECT_THAT(text({"gap", {2, 5}, 0, 3}),
              ::testing::AllOf(HasSubstr("[2, 5]"), HasSubstr("[10]")));
  EXPECT_THAT(text({"gap", {10}, 8, 3}), HasSubstr("not within"));
  EXPECT_THAT(text({"gap", {10}, -1, 3}), HasSubstr("not within"));
  EXPECT_THAT(text({"step", {10}, 0, 10}), HasSubstr("scalars differ"));
  EXPECT_THAT(text({"dtype", {10}, 0, 10}), HasSubstr("dtype"));
  EXPECT_THAT(text({"names", {10}, 0, 10}), HasSubstr("tensors m and m, v"));
  EXPECT_THAT(text({"count", {10}, 2, 6}), HasSubstr("n is kept whole, but differs"));
  EXPECT_EQ(checkpoint.load_slices({{"gap", {10}, 6, 3}})[0].state.tensors.at("m").numel(), 3);
  EXPECT_TRUE(checkpoint.load_slices({{"unknown", {10}, 0, 10}})[0].stateless());
}

TEST_F(Slices, SetsAreIndependentOfEachOther) {
  const auto slice = [](double value) {
    StateSlice result{{"w", {3}, 0, 3}, {}};
    result.state.tensors["m"] = at::full({3}, value);
    return result;
  };
  CheckpointStore store(run_);
  CheckpointWriter writer(store, 1);
  writer.add_slices({slice(1)});
  writer.add_slices({slice(2)}, "model");
  const Checkpoint checkpoint(writer.commit());
  checkpoint.verify();
  EXPECT_TRUE(checkpoint.contains("model-00000-of-00001.safetensors"));
  expect_same(checkpoint.load_slices({{"w", {3}, 0, 3}})[0], slice(1));
  expect_same(checkpoint.load_slices({{"w", {3}, 0, 3}}, "model")[0], slice(2));
  EXPECT_TRUE(checkpoint.load_slices({{"w", {3}, 0, 3}}, "other")[0].stateless());
  EXPECT_THAT(usage_error([&] {
                checkpoint.load_slices({{"w", {4}, 0, 3}}, "model");
              }),
              HasSubstr("model slices of \"w\": the parameter has shape [4] here"));
}

TEST_F(Slices, InvalidSlicesAreRefused) {
  const auto refused = [&](std::vector<StateSlice> slices) {
    CheckpointStore store(run_);
    CheckpointWriter writer(store, 1);
    writer.add_slices(slices);
    return usage_error([&] { writer.commit(); });
  };
  EXPECT_THAT(refused({{{"w", {3}, 1, 3}, {}}}),
              ::testing::AllOf(HasSubstr("\"w\""), HasSubstr("not within")));
  EXPECT_THAT(refused({{{"w", {3}, 0, 1}, {}}, {{"w", {3}, 0, 1}, {}}}), HasSubstr("given twice"));
  EXPECT_THAT(refused({{{"w", {1, -3}, 0, 0}, {}}}), HasSubstr("negative"));
  EXPECT_THAT(refused({{{"\xff", {3}, 0, 1}, {}}}), HasSubstr("UTF-8"));
  StateSlice undefined{{"w", {3}, 0, 3}, {}};
  undefined.state.tensors["m"] = at::Tensor();
  EXPECT_THAT(refused({undefined}), HasSubstr("m is undefined"));
  EXPECT_EQ(names_in(run_), std::set<std::string>{".lock"});
}

TEST_F(Slices, OverlappingSlicesAreAllowed) {
  // Hybrid sharding saves two replicas.
  const auto part = [](int64_t begin, int64_t numel) {
    StateSlice slice{{"w", {9}, begin, numel}, {}};
    slice.state.tensors["m"] = at::arange(begin, begin + numel, at::kFloat);
    return slice;
  };
  const Checkpoint checkpoint(save({{part(0, 4)}, {part(4, 5)}, {part(0, 4)}, {part(4, 5)}}));
  EXPECT_TRUE(same_bits(checkpoint.load_slices({{"w", {9}, 0, 9}})[0].state.tensors.at("m"),
                        at::arange(9, at::kFloat)));
}

}  // namespace
}  // namespace tessera
