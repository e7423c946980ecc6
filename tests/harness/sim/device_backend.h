#pragma once

#include <memory>

#include "comm/base/device_backend.h"
#include "comm/base/world.h"

namespace tessera::sim {

/// A c10d backend for the simulated device, as NCCL is for CUDA: collectives run on a stream of
/// their own, behind what the current stream has issued. It refuses CPU tensors.
std::shared_ptr<const comm::DeviceBackend> device_backend();

}  // namespace tessera::sim
