#include "tessera/step/weight_average.h"

#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/thrown_by.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::thrown_by;

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto x = a.detach().contiguous(), y = b.detach().contiguous();
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
         std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

/// Weights after optimizer step `step`. A value depends only on `step` and its index.
at::Tensor values(int64_t numel, int step) {
  return at::sin(at::arange(numel, at::kFloat) * 0.37f + static_cast<float>(step));
}

TEST(WeightAverage, IsTheClosedFormula) {
  auto live = at::full({2}, 10.0, at::kDouble);
  WeightAverage average({live}, 0.9);
  double expected = 10;
  for (const double value : {20.0, -5.0, 3.0, 3.0}) {
    live.fill_(value);
    average.update();
    expected = 0.9 * expected + 0.1 * value;
    EXPECT_NEAR(average.averages()[0][1].item<double>(), expected, 1e-12);
  }
  EXPECT_EQ(average.updates(), 4);
}

TEST(WeightAverage, WarmupStartsWithASmallerDecay) {
  auto live = at::zeros({1}, at::kDouble);
  WeightAverage average({live}, 0.2, {.warmup = true});
  live.fill_(1);
  double expected = 0;
  for (const double decay : {0.1, 2.0 / 11, 0.2, 0.2}) {  // then 3/12 is more than 0.2
    average.update();
    expected = decay * expected + (1 - decay);
    EXPECT_NEAR(average.averages()[0].item<double>(), expected, 1e-12);
  }
}

TEST(WeightAverage, DoesNotDependOnTheSharding) {
  constexpr int64_t kNumel = 1003;
  auto whole = values(kNumel, 0);
  auto cut = whole.clone();
  const std::vector<at::Tensor> shards = {cut.narrow(0, 0, 7), cut.narrow(0, 7, 0),
                                          cut.narrow(0, 7, 514), cut.narrow(0, 521, kNumel - 521)};
  WeightAverage of_whole({whole}, 0.99), of_shards(shards, 0.99);
  for (int step = 1; step < 6; ++step) {
    whole.copy_(values(kNumel, step));
    cut.copy_(whole);
    of_whole.update();
    of_shards.update();
  }
  EXPECT_TRUE(same_bits(of_whole.averages()[0], at::cat(of_shards.averages())));
}

TEST(WeightAverage, SwapTwiceIsTheIdentity) {
  std::vector<at::Tensor> live = {values(17, 0), values(9, 1).to(at::kBFloat16),
                                  values(5, 2).to(at::kHalf).requires_grad_()};
  WeightAverage average(live, 0.5);
  {
    at::NoGradGuard no_grad;
    for (auto& tensor : live) tensor.add_(0.7003);
    live[0][3] = std::numeric_limits<float>::quiet_NaN();
    live[1][0] = -0.0;
  }
  average.update();
  std::vector<at::Tensor> live_before, averages_before;
  for (const auto& tensor : live) live_before.push_back(tensor.detach().clone());
  for (const auto& tensor : average.averages()) averages_before.push_back(tensor.clone());

  average.swap();
  EXPECT_TRUE(average.swapped());
  for (size_t i = 0; i < live.size(); ++i) {
    EXPECT_TRUE(same_bits(live[i], averages_before[i].to(live[i].scalar_type()))) << i;
    EXPECT_FALSE(same_bits(live[i], live_before[i])) << i;
  }
  average.swap();
  EXPECT_FALSE(average.swapped());
  for (size_t i = 0; i < live.size(); ++i) {
    EXPECT_TRUE(same_bits(live[i], live_before[i])) << i;
    EXPECT_TRUE(same_bits(average.averages()[i], averages_before[i])) << i;
  }
}

TEST(WeightAverage, HalfTypesAreAveragedInFloat) {
  auto live = at::ones({1}, at::kBFloat16);
  WeightAverage average({live}, 0.999);
  ASSERT_EQ(average.averages()[0].scalar_type(), at::kFloat);
  live.fill_(2);
  for (int i = 0; i < 10; ++i) average.update();  // in bfloat16, 1 + 0.001 is 1
  EXPECT_NEAR(average.averages()[0].item<float>(), 2 - std::pow(0.999, 10), 1e-6);
}

TEST(WeightAverage, CountersAreCopied) {
  auto counter = at::zeros({}, at::kLong);
  WeightAverage average({counter}, 0.9);
  counter.fill_(41);
  average.update();
  EXPECT_EQ(average.averages()[0].item<int64_t>(), 41);
}

TEST(WeightAverage, ALoadedAverageContinuesBitByBit) {
  auto live = values(33, 0);
  WeightAverage first({live}, 0.9, {.warmup = true});
  for (int step = 1; step < 4; ++step) {
    live.copy_(values(33, step));
    first.update();
  }
  auto resumed_live = live.clone();
  WeightAverage second({resumed_live}, 0.9, {.warmup = true});
  second.load({first.averages()[0].clone()}, first.updates());
  live.copy_(values(33, 4));
  resumed_live.copy_(live);
  first.update();
  second.update();
  EXPECT_TRUE(same_bits(first.averages()[0], second.averages()[0]));
  EXPECT_EQ(second.updates(), 4);
}

TEST(WeightAverage, RefusesFaultyArgumentsNamingThem) {
  EXPECT_EQ(thrown_by([] { WeightAverage({at::ones({1})}, 1.0); }),
            "WeightAverage: decay: 1; expected a number >= 0 and < 1");
  EXPECT_THAT(thrown_by([] {
                WeightAverage({at::ones({1}), at::Tensor()}, 0.5);
              }),
              HasSubstr("tensor 1 of 2 is undefined"));
  WeightAverage average({at::ones({2, 3})}, 0.5);
  EXPECT_THAT(thrown_by([&] { average.load({}, 0); }), HasSubstr("got 0 tensors, expected 1"));
  EXPECT_THAT(thrown_by([&] {
                average.load({at::ones({3, 2})}, 0);
              }),
              HasSubstr("tensor 0 is [3, 2], expected [2, 3]"));
  EXPECT_THAT(thrown_by([&] { average.load({at::Tensor()}, 0); }),
              HasSubstr("tensor 0 is undefined"));
  EXPECT_THAT(thrown_by([&] { average.load({at::ones({2, 3})}, -1); }), HasSubstr("updates: -1"));
  average.swap();
  EXPECT_THAT(thrown_by([&] { average.update(); }),
              HasSubstr("update() was called while the averages are in the live tensors"));
  EXPECT_THAT(thrown_by([&] {
                average.load({at::ones({2, 3})}, 0);
              }),
              HasSubstr("load() was called while"));
}

TEST(WeightAverage, ARankWithoutShardsBehavesTheSame) {
  WeightAverage average({}, 0.5);
  average.swap();
  EXPECT_THAT(thrown_by([&] { average.update(); }), HasSubstr("expected swap() first"));
}

}  // namespace
}  // namespace tessera
