#pragma once

#include <memory>
#include <string>

#include "comm/base/transport.h"
#include "comm/base/world.h"
#include "comm/p2p/mailbox.h"

namespace tessera::comm {

// Collectives built from messages between hosts and, within a host, shared memory. They do not
// depend on the collectives of a backend (libtorch 1.13's Gloo lacks reduce_scatter, and its list
// all_gather copies twice), and each wait knows the rank it waits for.
//
// A host sends another host each value once. Bytes sent by each of W ranks for a tensor of N bytes,
// if every host has one: all_gather and reduce_scatter (W-1)/W N; all_reduce 2 (W-1)/W N;
// broadcast, from the root, 2 (W-1)/W N (scatter, then all-gather). For small tensors all_reduce is
// an all-gather of (W-1) N, and broadcast sends N to each rank along a tree. With H hosts each host
// sends ceil(log2 H) messages for headers, and at most as many for a small all-reduce, all-gather
// or broadcast.

/// Every rank counts as a host of its own: messages alone.
std::unique_ptr<Transport> make_message_transport(const World& world,
                                                  std::unique_ptr<Mailbox> mailbox);

/// Connects a group that has several hosts, some with several ranks: shared memory within each
/// host, messages between hosts. Collective. Returns null on all ranks if the ranks of some host
/// cannot share memory; `reason` then names the host's first rank and the cause. Throws
/// BrokenWorldError naming the ranks that did not arrive.
std::unique_ptr<Transport> make_hosts_transport(const World& world, std::string& reason);

}  // namespace tessera::comm
