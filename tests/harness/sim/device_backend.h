#pragma once

#include <cstdint>
#include <memory>

#include "comm/base/device_backend.h"
#include "comm/base/world.h"

namespace tessera::sim {

/// A c10d backend for the simulated device, as NCCL is for CUDA: collectives run on a stream of
/// their own, behind what the current stream has issued. It refuses CPU tensors, and if
/// `exclusive`, two ranks on one device. Its collectives end when the group aborts them, unless
/// `can_abort` is false.
std::shared_ptr<const comm::DeviceBackend> device_backend(bool exclusive = false,
                                                          bool can_abort = true);

/// How many collectives this process's backends have begun.
uint64_t backend_calls();

}  // namespace tessera::sim
