#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/p2p/mailbox.h"

namespace tessera::comm {

/// How many connections of a pair of ranks carry what a network does: a thread moves about 16
/// Gbit/s each way through one. `speed`: of the network, in Mbit/s; 0: unknown. `ranks`: of the
/// host, which share the network and `cores`. From 1 to 4. Pure.
int stripes_for(int64_t speed, int ranks, int cores);

/// A mailbox over several of the same members and kind: a large message travels in equal parts, one
/// through each, so that more than one connection and one core move it. Others travel through the
/// first. One alone is returned as it is. `mailboxes` is not empty.
std::unique_ptr<Mailbox> make_striped_mailbox(std::vector<std::unique_ptr<Mailbox>> mailboxes);

}  // namespace tessera::comm
