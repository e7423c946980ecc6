#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

namespace tessera::testing {

/// Normally distributed numbers that require a gradient, equal for every dtype but for rounding.
inline at::Tensor drawn(at::IntArrayRef shape, at::ScalarType type, uint64_t seed) {
  return at::empty(shape, at::kDouble)
      .normal_(0, 1, at::detail::createCPUGenerator(seed))
      .to(type)
      .requires_grad_();
}

/// No element of `a` differs from that of `b` by `bound` or more; none is NaN.
inline void expect_close(const at::Tensor& a, const at::Tensor& b, double bound) {
  ASSERT_EQ(a.sizes(), b.sizes());
  EXPECT_LT((a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>(), bound);
}

}  // namespace tessera::testing
