#pragma once

#include "comm/rendezvous/store_rendezvous.h"
#include "tessera/detail/communicator.h"

namespace tessera::comm {

/// Connects the ranks of a communicator through a store: a file in memory where all ranks are on
/// one host, else a store that rank 0 serves, with a fresh secret, on a port that the system
/// chooses. Both travel over the communicator. Collective; blocks until all ranks have arrived, at
/// most about the time-out. Throws UsageError, on all ranks, for options that differ or cannot
/// work, and if a rank cannot reach rank 0; BrokenWorldError if ranks do not arrive.
StoreRendezvous rendezvous_over_communicator(detail::Communicator& communicator,
                                             const ProcessGroupOptions& options);

}  // namespace tessera::comm
