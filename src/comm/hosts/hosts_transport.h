#pragma once

#include <memory>

#include "comm/base/transport.h"
#include "comm/base/world.h"
#include "comm/p2p/mailbox.h"

namespace tessera::comm {

/// Connects a group that has several hosts, some with several ranks: shared memory within each
/// host, messages between hosts. Each host sends what another host needs once. Collective. Returns
/// null on all ranks if the ranks of some host cannot share memory; `reason` then names the host's
/// first rank and the cause. Throws BrokenWorldError naming the ranks that did not arrive.
std::unique_ptr<Transport> make_hosts_transport(const World& world, std::string& reason);

}  // namespace tessera::comm
