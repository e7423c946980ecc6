#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "harness/training.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace tessera::testing {

using Zero = ZeroRedundancyOptimizer;
using ZeroOptions = ZeroRedundancyOptimizerOptions;

inline OptimizerFactory factory(const std::string& name, OptionMap options = {{"lr", 0.05}}) {
  return default_optimizers().factory(name, options);
}

inline constexpr Partition kPartitions[] = {Partition::flat, Partition::whole,
                                            Partition::first_fit};

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
