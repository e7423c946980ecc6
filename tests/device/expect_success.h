#pragma once

#include <functional>

#include <gmock/gmock.h>

#include "harness/sim/rank_processes.h"

namespace tessera::sim {

/// Runs `body` on processes of the simulated device with the seeds from 1 on, and expects no error.
inline void expect_success(int world, const std::function<void(Groups&)>& body, int seeds = 3) {
  for (int seed = 1; seed <= seeds; ++seed) {
    const auto errors = run_processes(world, seed, body);
    EXPECT_EQ(errors.size(), static_cast<size_t>(world));
    EXPECT_THAT(errors, ::testing::Each("")) << world << " ranks, seed " << seed;
  }
}

}  // namespace tessera::sim
