#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace tessera::testing {

using Zero = ZeroRedundancyOptimizer;
using ZeroOptions = ZeroRedundancyOptimizerOptions;

inline OptimizerFactory factory(const std::string& name, OptionMap options = {{"lr", 0.05}}) {
  return default_optimizers().factory(name, options);
}

/// Batch of a step: 12 rows, of which rank r of W takes its equal part (W = 1, 2, 3, 4 all divide
/// it).
inline at::Tensor rows(int step, int rank = 0, int world = 1) {
  const auto all = at::randn({12, 3}, at::make_generator<at::CPUGeneratorImpl>(100 + step));
  return all.narrow(0, 12 / world * rank, 12 / world);
}

inline at::Tensor images(int step, int rank = 0, int world = 1) {
  const auto all = at::randn({12, 2, 4, 4}, at::make_generator<at::CPUGeneratorImpl>(200 + step));
  return all.narrow(0, 12 / world * rank, 12 / world);
}

inline constexpr Partition kPartitions[] = {Partition::flat, Partition::whole,
                                            Partition::first_fit};

/// Bit by bit.
template <class Net>
void expect_same_weights(const Net& a, const Net& b) {
  for (const auto& item : a->named_parameters())
    EXPECT_TRUE(at::equal(item.value(), b->named_parameters()[item.key()])) << item.key();
}

inline at::Tensor loss_of(const at::Tensor& y) { return (y - 0.5).square().mean(); }

/// Gradients that the caller reduced: three steps on two ranks end, bit by bit, where the
/// optimizer's own reduction does. `before_step` does to both what comes before step().
template <class Net>
void expect_callers_reduction_is_as_good(at::Tensor (*batch)(int step, int rank, int world),
                                         const std::function<void(Zero&)>& before_step) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Net>(8), other = seeded<Net>(8);
    Zero own(*net, group, factory("AdamW")),
        theirs(*other, group, factory("AdamW"), {.reduce_gradients = false});
    for (int step = 0; step < 3; ++step) {
      loss_of(net(batch(step, rank, 2))).backward();
      loss_of(other(batch(step, rank, 2))).backward();
      for (auto& p : other->parameters()) group.all_reduce(p.mutable_grad(), 0.5);
      for (auto* zero : {&own, &theirs}) {
        before_step(*zero);
        zero->step();
        zero->zero_grad();
      }
    }
    expect_same_weights(net, other);
  });
}

}  // namespace tessera::testing
