#include "tessera/step/grad_scaler.h"

#include <atomic>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/ranks.h"
#include "harness/thrown_by.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::thrown_by;

constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<at::Tensor> gradients_with(double value, at::ScalarType dtype = at::kFloat) {
  auto second = at::ones({2, 5}, dtype);
  second[1][3] = value;
  return {at::Tensor(), at::ones({3}, dtype), at::empty({0}, dtype), second};
}

bool found_alone(const std::vector<at::Tensor>& gradients, GradScalerOptions options = {}) {
  ProcessGroup alone;
  return GradScaler(options).found_inf(gradients, alone);
}

TEST(GradScaler, ScalesTheLossAndInvertsIt) {
  const GradScaler scaler({.init_scale = 1024});
  const auto loss = at::tensor({3.0f}).requires_grad_();
  scaler.scale(loss).backward();
  EXPECT_EQ(loss.grad().item<float>(), 1024);
  EXPECT_EQ(loss.grad().item<float>() * scaler.inverse(), 1);
  const auto half = GradScaler().scale(at::tensor({2.0f}).to(at::kHalf));
  EXPECT_EQ(half.scalar_type(), at::kFloat);
  EXPECT_EQ(half.item<float>(), 131072);
}

TEST(GradScaler, ReadsComplexAndSparseGradients) {
  const auto complex = [](double imaginary) {
    return at::complex(at::ones({3}), at::full({3}, imaginary));
  };
  EXPECT_FALSE(found_alone({complex(-1e38), at::ones({2}), at::eye(3).to_sparse()}));
  EXPECT_TRUE(found_alone({at::ones({2}), complex(INFINITY)}));
  EXPECT_TRUE(found_alone({complex(1), (at::eye(3) * NAN).to_sparse()}));
}

TEST(GradScaler, GrowsAfterFiniteStepsAndBacksOff) {
  GradScaler scaler(
      {.init_scale = 16, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3});
  const auto scale_after = [&](bool found_inf) { return scaler.update(found_inf), scaler.scale(); };
  EXPECT_EQ(scale_after(false), 16);
  EXPECT_EQ(scale_after(false), 16);
  EXPECT_EQ(scale_after(false), 64);
  EXPECT_EQ(scale_after(false), 64);
  EXPECT_EQ(scale_after(false), 64);
  EXPECT_EQ(scale_after(true), 16);  // restarts the count
  EXPECT_EQ(scale_after(false), 16);
  EXPECT_EQ(scale_after(false), 16);
  EXPECT_EQ(scale_after(false), 64);
}

TEST(GradScaler, TheScaleStaysANormalFloat) {
  GradScaler scaler({.growth_interval = 1});
  for (int i = 0; i < 300; ++i) scaler.update(false);
  EXPECT_EQ(scaler.scale(), std::ldexp(1.0, 127));
  for (int i = 0; i < 600; ++i) scaler.update(true);
  EXPECT_EQ(scaler.scale(), std::ldexp(1.0, -126));
  EXPECT_EQ(scaler.inverse(), std::ldexp(1.0, 126));
}

TEST(GradScaler, ChecksBothPartsOfComplexGradients) {
  const auto gradient = [](float real, float imaginary) {
    return at::view_as_complex(at::tensor({1.0f, 2.0f, real, imaginary}).view({2, 2}));
  };
  EXPECT_FALSE(found_alone({gradient(3, 4)}));
  EXPECT_FALSE(found_alone({gradient(3, 4).conj(), at::ones({2})}));
  EXPECT_FALSE(found_alone({gradient(3e38f, 3e38f), gradient(3e38f, 3e38f)}));  // a sum overflows
  EXPECT_TRUE(found_alone({gradient(kInfinity, 4)}));
  EXPECT_TRUE(found_alone({gradient(3, kNotANumber)}));
}

TEST(GradScaler, WithDynamicOffTheScaleStaysAndInfinitiesAreFound) {
  const GradScalerOptions options{.dynamic = false, .init_scale = 128, .growth_interval = 1};
  GradScaler scaler(options);
  for (const bool found_inf : {false, true, false}) scaler.update(found_inf);
  EXPECT_EQ(scaler.scale(), 128);
  EXPECT_TRUE(found_alone(gradients_with(kInfinity), options));
}

TEST(GradScaler, WhenDisabledItDoesNothing) {
  GradScaler scaler({.enabled = false});
  const auto loss = at::ones({});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 1);
  EXPECT_EQ(scaler.inverse(), 1);
  EXPECT_FALSE(found_alone(gradients_with(kInfinity), {.enabled = false}));
}

TEST(GradScaler, FindsEveryNonFiniteValue) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    EXPECT_FALSE(found_alone(gradients_with(2, dtype))) << dtype;
    for (const double value : {kInfinity, -kInfinity, kNotANumber})
      EXPECT_TRUE(found_alone(gradients_with(value, dtype))) << dtype << value;
  }
  EXPECT_TRUE(found_alone({at::tensor({kInfinity}), at::tensor({-kInfinity})}));
  EXPECT_FALSE(found_alone({}));
}

TEST(GradScaler, LargeFiniteGradientsAreFinite) {
  const auto large = at::full({4}, 3e38f);
  ASSERT_TRUE(at::isinf(large.sum()).item<bool>());
  EXPECT_FALSE(found_alone({large, large}));
  EXPECT_FALSE(found_alone({at::full({40000}, 60000.0f).to(at::kHalf)}));
}

TEST(GradScaler, OneRanksInfinityIsFoundOnAllWithOneAllReduce) {
  for (const double value : {kInfinity, kNotANumber}) {
    testing::run_ranks(3, [&](ProcessGroup group, int rank) {
      const GradScaler scaler;
      EXPECT_FALSE(scaler.found_inf(gradients_with(1), group)) << rank;
      group.reset_stats();
      EXPECT_TRUE(scaler.found_inf(gradients_with(rank == 1 ? value : 1), group)) << rank;
      EXPECT_EQ(group.stats().all_reduce.calls, 1u);
      EXPECT_EQ(group.stats().calls(), 1u);
      EXPECT_LE(group.stats().payload_sent(), 8u);
      EXPECT_FALSE(GradScaler({.enabled = false}).found_inf(gradients_with(value), group));
      EXPECT_EQ(group.stats().calls(), 1u);
    });
  }
}

TEST(GradScaler, ALoadedStateContinues) {
  const GradScalerOptions options{.init_scale = 8, .growth_interval = 4};
  GradScaler first(options);
  for (const bool found_inf : {true, false, false, false}) first.update(found_inf);
  GradScaler second(options);
  second.load_state(first.state());
  EXPECT_EQ(second.scale(), 4);
  second.update(false);
  EXPECT_EQ(second.scale(), 8);
}

TEST(GradScaler, OptionsOutOfRangeAreNamed) {
  EXPECT_EQ(thrown_by([] { GradScaler({.init_scale = 0}); }),
            "GradScaler: init_scale: 0; expected a number > 0");
  EXPECT_THAT(thrown_by([] { GradScaler({.init_scale = kInfinity}); }),
              HasSubstr("init_scale: inf"));
  EXPECT_THAT(thrown_by([] { GradScaler({.growth_factor = 1}); }),
              HasSubstr("growth_factor: 1; expected a number > 1"));
  EXPECT_THAT(thrown_by([] { GradScaler({.backoff_factor = 1}); }),
              HasSubstr("backoff_factor: 1; expected a number > 0 and < 1"));
  EXPECT_THAT(thrown_by([] { GradScaler({.growth_interval = 0}); }),
              HasSubstr("growth_interval: 0"));
  EXPECT_THAT(thrown_by([] { GradScaler().load_state({.scale = kNotANumber}); }),
              HasSubstr("state.scale: nan"));
  EXPECT_THAT(thrown_by([] { GradScaler().load_state({.growth_tracker = -1}); }),
              HasSubstr("state.growth_tracker: -1"));
}

}  // namespace
}  // namespace tessera
