#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/device_backend.h"
#include "comm/base/world.h"

namespace tessera::comm {

/// The backend that this process has for accelerators of `type`: NCCL for CUDA in a build with it.
/// Null: none.
std::shared_ptr<const DeviceBackend> backend_of(at::DeviceType type, const World& world);
/// The process has this backend from now on, for tests. Not thread-safe.
void add_backend(std::shared_ptr<const DeviceBackend> backend);

/// A number for what DeviceBackend::identity() returns: 0 for "", more than kNotSeen for a text.
constexpr int64_t kNotSeen = 1;
int64_t number_of_identity(const std::string& identity);
/// The first two ranks of one host whose devices have the same number. Those with 0 have none in
/// common. `hosts`: of World.
std::optional<std::pair<int, int>> ranks_of_one_device(const std::vector<int64_t>& devices,
                                                       const std::vector<int>& hosts);

}  // namespace tessera::comm
