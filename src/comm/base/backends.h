#pragma once

#include <memory>

#include "comm/base/transport.h"
#include "comm/base/world.h"

namespace tessera::comm {

/// The transport that `world.options.backend` asks for. Collective. Auto: shared memory, else Gloo
/// with a warning.
std::unique_ptr<Transport> make_transport(const World& world);

/// Whole files chosen by CMake (nccl_transport.cpp or no_nccl.cpp, mpi_mailbox.cpp or no_mpi.cpp);
/// without the backend they throw UsageError.
std::unique_ptr<Transport> make_nccl_transport(const World& world);
std::unique_ptr<Transport> make_mpi_transport(const World& world);

}  // namespace tessera::comm
