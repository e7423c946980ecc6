#pragma once

#include <functional>

#include <gmock/gmock.h>

#include "harness/device/device.h"
#include "harness/device/rank_processes.h"

namespace tessera::on_device {

/// Runs `body` on processes with the device, where that is simulated with the seeds from 1 on, and
/// expects no error.
inline void expect_success(int world, const std::function<void(Groups&)>& body, int seeds = 3) {
  if (!has_kernels_of_cpu()) seeds = 1;
  for (int seed = 1; seed <= seeds; ++seed) {
    const auto errors = run_processes(world, seed, body);
    EXPECT_EQ(errors.size(), static_cast<size_t>(world));
    EXPECT_THAT(errors, ::testing::Each("")) << world << " ranks, seed " << seed;
  }
}

}  // namespace tessera::on_device
