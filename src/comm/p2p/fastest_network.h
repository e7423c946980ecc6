#pragma once

#include <string>
#include <vector>

#include "comm/base/world.h"
#include "comm/store/addresses.h"

namespace tessera::comm {

/// A network through which the hosts may exchange messages, or the program's own MPI.
struct Network {
  std::string name;       ///< "192.0.2.0/24", "the route to rank 0", or kMpi.
  double rate = 0;        ///< Bytes a second, as measured; 0: it does not reach all hosts.
  int64_t speed = 0;      ///< Mbit/s, of the slowest host's driver; 0: unknown.
  std::string interface;  ///< Of rank 0, for messages.
  std::vector<std::string> addresses;  ///< One a host.
};

/// The name of the network that stands for the program's MPI.
constexpr auto kMpi = "MPI";

/// The index of the one to use. The first is that of the route to rank 0: another one must have 5/4
/// of its rate, or the same rate and a higher speed by its driver. MPI must have twice the rate,
/// because it does not tell which rank is lost. Pure.
size_t fastest_of(const std::vector<Network>& networks);

/// The carrier of messages between hosts.
struct Route {
  std::string address;  ///< Of this host.
  bool over_mpi = false;
};

/// The fastest of the networks that all hosts share, and of the program's MPI if
/// `world.start_group.communicator` is set. Without two of them, `world.address`. Each is tried
/// with 4 MiB between neighbouring hosts and one byte between any two; it takes the time of these,
/// or 3 seconds for one that does not reach a host. Rank 0 writes the choice to the log.
///
/// `own`: the interfaces of this host, which are read of its first rank alone; none where it must
/// keep `world.address`. The ranks of a world on several hosts call it; blocks until all have.
/// Throws BrokenWorldError for ranks that do not come.
Route fastest_route(const World& world, const std::vector<NetworkInterface>& own);

}  // namespace tessera::comm
