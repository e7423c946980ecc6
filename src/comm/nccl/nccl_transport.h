#pragma once

#include <memory>

#include "comm/base/transport.h"
#include "comm/base/world.h"

namespace tessera::comm {

/// Collectives over NCCL on the ranks' current CUDA devices. Collective: blocks until all members
/// have connected. Throws UsageError where this build has no NCCL or this rank sees no CUDA device,
/// BrokenWorldError when the ranks cannot connect. Implemented by nccl_transport.cpp or
/// no_nccl.cpp, of which CMake compiles one.
std::unique_ptr<Transport> make_nccl_transport(const World& world);

}  // namespace tessera::comm
