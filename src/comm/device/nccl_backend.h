#pragma once

#include <memory>

#include "comm/base/device_backend.h"
#include "comm/base/world.h"

namespace tessera::comm {

/// True if this build has NCCL.
extern const bool kHasNccl;

/// NCCL on the ranks' current CUDA devices. Throws UsageError where this build has no NCCL or this
/// rank sees no CUDA device. Implemented by nccl_backend.cpp or no_nccl.cpp, of which CMake
/// compiles one.
std::shared_ptr<const DeviceBackend> nccl_backend(const World& world);

}  // namespace tessera::comm
