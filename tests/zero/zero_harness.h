#pragma once

#include "harness/models.h"
#include "harness/ranks.h"
#include "tessera/error.h"
#include "tessera/zero_redundancy_optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::testing {

using Zero = ZeroRedundancyOptimizer;
using ZeroOptions = ZeroRedundancyOptimizerOptions;

inline OptimizerFactory factory(const std::string& name, OptionMap options = {{"lr", 0.05}}) {
  return default_optimizers().factory(name, options);
}

/// Batch of a step: 12 rows, of which rank r of W takes its equal part (W = 1, 2, 3, 4 all divide it).
inline at::Tensor rows(int step, int rank = 0, int world = 1) {
  const auto all = at::randn({12, 3}, at::make_generator<at::CPUGeneratorImpl>(100 + step));
  return all.narrow(0, 12 / world * rank, 12 / world);
}

inline at::Tensor images(int step, int rank = 0, int world = 1) {
  const auto all = at::randn({12, 2, 4, 4}, at::make_generator<at::CPUGeneratorImpl>(200 + step));
  return all.narrow(0, 12 / world * rank, 12 / world);
}

inline constexpr Partition kPartitions[] = {Partition::flat, Partition::whole, Partition::first_fit};

/// The text of the UsageError that the call throws.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

/// Bit by bit.
template <class Net>
void expect_same_weights(const Net& a, const Net& b) {
  for (const auto& item : a->named_parameters()) EXPECT_TRUE(at::equal(item.value(), b->named_parameters()[item.key()])) << item.key();
}

inline at::Tensor loss_of(const at::Tensor& y) { return (y - 0.5).square().mean(); }

}  // namespace tessera::testing
