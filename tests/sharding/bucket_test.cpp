#include "sharding/bucket.h"

#include <gtest/gtest.h>

#include "harness/memory.h"

namespace tessera::testing {
namespace {

[[maybe_unused]] const bool kFreedIsReturned = return_freed_blocks();

TEST(BucketMemory, AGradientThatMovesIsInMemoryOnce) {
  constexpr int64_t numel = 20'000'003;
  auto gradient = at::arange(numel, at::kFloat);
  const auto window = at::empty({numel}, at::kFloat);
  const int64_t before = resident_bytes();
  reset_peak();
  sharding::move_to(gradient, window);
  EXPECT_LT(peak_bytes() - before, 16 * kMiB) << "of 76 MiB";
  EXPECT_TRUE(at::equal(window, at::arange(numel, at::kFloat)));

  gradient = at::arange(12.0).view({3, 4}).t();  // of another form than its window
  const auto other = at::empty({4, 3}, at::kFloat);
  sharding::move_to(gradient, other);
  EXPECT_TRUE(at::equal(other, at::arange(12.0).view({3, 4}).t()));
}

TEST(Bucket, ANegativeGradientIsPlacedWithItsValues) {
  const auto gradient = at::_neg_view(at::arange(6, at::kFloat));
  const auto window = at::empty({6}, at::kFloat);
  sharding::place(gradient, window);
  EXPECT_TRUE(at::equal(window, -at::arange(6, at::kFloat)));
  sharding::move_to(gradient, window.zero_());
  EXPECT_TRUE(at::equal(window, -at::arange(6, at::kFloat)));
}

}  // namespace
}  // namespace tessera::testing
