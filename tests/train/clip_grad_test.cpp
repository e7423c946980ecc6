#include "tessera/step/clip_grad.h"

#include <cmath>

#include <gtest/gtest.h>

#include "tessera/error.h"

namespace tessera {
namespace {

std::vector<at::Tensor> gradients() {
  return {torch::tensor({3.0f, 0.0f}), at::Tensor(), torch::empty({0}),
          torch::tensor({-4.0}, at::kDouble)};
}

TEST(ClipGrad, TheNormIsOfAllTensorsTogether) {
  EXPECT_EQ(clip_gradient_norm_(gradients(), INFINITY), 5);
  EXPECT_EQ(clip_gradient_norm_(gradients(), INFINITY, 1), 7);
  EXPECT_EQ(clip_gradient_norm_(gradients(), INFINITY, INFINITY), 4);
  EXPECT_EQ(clip_gradient_norm_({}, INFINITY), 0);
  EXPECT_THROW(clip_gradient_norm_(gradients(), INFINITY, 0), UsageError);
}

TEST(ClipGrad, ClippingByNormFollowsTorchNnUtils) {
  auto ours = gradients();
  EXPECT_EQ(clip_gradient_norm_(ours, 1), 5);
  EXPECT_TRUE(at::equal(ours[0], torch::tensor({3.0f, 0.0f}) * (1 / (5 + 1e-6))));
  EXPECT_TRUE(at::equal(ours[3], torch::tensor({-4.0}, at::kDouble) * (1 / (5 + 1e-6))));
  EXPECT_THROW(clip_gradient_norm_(ours, -1), UsageError);
}

TEST(ClipGrad, TheNormMayBeATensor) {
  for (const double p : {1.0, 2.0, 3.0, double{INFINITY}}) {
    auto expected = gradients(), ours = gradients();
    const double norm = clip_gradient_norm_(expected, 1, p);
    const auto tensor = clip_gradient_norm_(ours, 1, p).tensor();
    EXPECT_EQ(tensor.dim(), 0);
    EXPECT_EQ(tensor.scalar_type(), at::kDouble);
    EXPECT_EQ(tensor.item<double>(), norm) << p;
    EXPECT_TRUE(at::equal(ours[0], expected[0]) && at::equal(ours[3], expected[3])) << p;
  }
  EXPECT_EQ(clip_gradient_norm_({}, 1), 0);
  EXPECT_THROW(clip_gradient_norm_(gradients(), -1), UsageError);
}

TEST(ClipGrad, ALargeBoundChangesNothing) {
  auto ours = gradients();
  EXPECT_EQ(clip_gradient_norm_(ours, 6), 5);
  clip_gradient_values_(ours, 4);
  EXPECT_TRUE(at::equal(ours[0], gradients()[0]));
  EXPECT_TRUE(at::equal(ours[3], gradients()[3]));
}

TEST(ClipGrad, AnInfiniteBoundChangesNothingWhateverTheNormIs) {
  std::vector<at::Tensor> ours{torch::tensor({1.0f, INFINITY})};
  EXPECT_EQ(clip_gradient_norm_(ours, INFINITY), INFINITY);
  ours[0][1] = NAN;
  EXPECT_TRUE(std::isnan(clip_gradient_norm_(ours, INFINITY)));
  EXPECT_EQ(ours[0][0].item<float>(), 1);
}

TEST(ClipGrad, ClippingByValueClampsEveryElement) {
  auto ours = gradients();
  clip_gradient_values_(ours, 2);
  EXPECT_TRUE(at::equal(ours[0], torch::tensor({2.0f, 0.0f})));
  EXPECT_TRUE(at::equal(ours[3], torch::tensor({-2.0}, at::kDouble)));
  EXPECT_THROW(clip_gradient_values_(ours, -1), UsageError);
}

TEST(ClipGrad, ANaNIsSeenByEveryNorm) {
  for (const double p : {1.0, 2.0, 3.0, double{INFINITY}}) {
    for (const bool last : {false, true}) {
      const auto with_nan = torch::tensor({1.0f, NAN, 2.0f}), without = torch::tensor({4.0f, 3.0f});
      std::vector<at::Tensor> gradients{last ? without : with_nan, last ? with_nan : without};
      EXPECT_TRUE(std::isnan(clip_gradient_norm_(gradients, INFINITY, p))) << p;
      EXPECT_TRUE(std::isnan(clip_gradient_norm_(gradients, 1.0, p))) << p;
      EXPECT_TRUE(gradients[0].isnan().all().item<bool>()) << "as torch's clip_grad_norm_";
      EXPECT_TRUE(gradients[1].isnan().all().item<bool>());
    }
  }
}

}  // namespace
}  // namespace tessera
