#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/p2p/mailbox.h"

namespace tessera::comm {

/// The number of connections of a pair of ranks that use a network fully: a thread moves about 16
/// Gbit/s each way through one. `speed`: of the network, in Mbit/s; 0: unknown. `ranks`: of the
/// host, which share the network and `cores`. From 1 to 4. Pure.
int stripes_for(int64_t speed, int ranks, int cores);

/// A mailbox over several mailboxes of the same members and kind. A large message travels in equal
/// parts, one through each, so that several connections and cores move it. Small messages travel
/// through the first mailbox. A single mailbox is returned as it is. `mailboxes` is not empty.
std::unique_ptr<Mailbox> make_striped_mailbox(std::vector<std::unique_ptr<Mailbox>> mailboxes);

}  // namespace tessera::comm
