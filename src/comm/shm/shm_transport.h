#pragma once

#include "comm/base/transport.h"
#include "comm/base/world.h"

namespace tessera::comm {

/// Shared memory between the ranks (processes, or threads) of one host. Returns null, on all ranks
/// alike, when any rank cannot map its peers' memory; `reason` then says which rank and why.
std::unique_ptr<Transport> make_shm_transport(const World& world, std::string& reason);

}  // namespace tessera::comm
