#pragma once

#include "comm/base/transport.h"
#include "comm/base/world.h"
#include "comm/shm/shm_transport.h"

namespace tessera::comm {

/// Connects ranks of one host, which are processes or threads, through shared memory. Collective.
/// Returns null on all ranks if any rank cannot map its peers' memory; `reason` then names the rank
/// and the cause. Throws BrokenWorldError naming the ranks that did not arrive.
std::unique_ptr<ShmTransport> make_shm_transport(const World& world, std::string& reason);

}  // namespace tessera::comm
