#pragma once

#include <functional>

#include <gmock/gmock.h>

#include "device/seeds.h"
#include "harness/device/rank_processes.h"

namespace tessera::on_device {

/// Runs `body` on processes with the device, where that is simulated with several seeds(), and
/// expects no error.
inline void expect_success(int world, const std::function<void(Groups&)>& body, int usual = 3) {
  for (const int seed : seeds(usual)) {
    const auto errors = run_processes(world, seed, body);
    EXPECT_EQ(errors.size(), static_cast<size_t>(world));
    EXPECT_THAT(errors, ::testing::Each("")) << world << " ranks, seed " << seed;
  }
}

}  // namespace tessera::on_device
