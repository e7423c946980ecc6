#include "tessera/data/bigram.h"

#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "tessera/error.h"

namespace tessera {
namespace {

TEST(Bigram, EqualsAnExplicitSum) {
  // In train, n(0) = 3 with 0→1 twice and 0→2 once, and n(1) = 2 with 1→0 twice.
  const Tokens train = Tokens::from({0, 1, 0, 1, 0, 2}), val = Tokens::from({0, 1, 2, 0});
  double best = 1e9;
  for (const double k : {1.0, 0.1, 0.01, 0.001}) {
    const double sum = std::log((2 + k) / (3 + 3 * k)) + std::log((0 + k) / (2 + 3 * k)) +
                       std::log((0 + k) / (0 + 3 * k));
    best = std::min(best, -sum / 3);
  }
  EXPECT_NEAR(bigram_cross_entropy(train, val, 3), best, 1e-12);
  EXPECT_THROW(bigram_cross_entropy(train, Tokens::from({1}), 3), UsageError);
  EXPECT_THROW(bigram_cross_entropy(train, val, 2), UsageError);
}

}  // namespace
}  // namespace tessera
