#pragma once

#include <memory>

#include "comm/base/transport.h"
#include "comm/base/world.h"
#include "comm/p2p/mailbox.h"

namespace tessera::comm {

/// Collectives built from point-to-point messages alone. They do not depend on the collectives of a
/// backend (libtorch 1.13's Gloo lacks reduce_scatter, and its list all_gather copies twice), and
/// each wait knows the rank it waits for.
///
/// Bytes sent by each rank for a tensor of N bytes on W ranks: all_gather and reduce_scatter
/// (W-1)/W N; all_reduce 2 (W-1)/W N; broadcast, from the root, 2 (W-1)/W N (scatter, then
/// all-gather). For small tensors all_reduce is an all-gather of (W-1) N, and broadcast sends N
/// to each rank along a tree. Each rank sends ceil(log2 W) messages for headers, and at most as
/// many for a small all-reduce, all-gather or broadcast.
std::unique_ptr<Transport> make_p2p_transport(const World& world, std::unique_ptr<Mailbox> mailbox);

}  // namespace tessera::comm
