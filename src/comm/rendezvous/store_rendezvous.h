#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/rendezvous/launch_environment.h"

namespace tessera::comm {

/// The result of start-up: the store that all ranks share, and their hosts.
struct StoreRendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  /// One number for each rank. Ranks with equal numbers share a host: its loopback interface and
  /// its memory.
  std::vector<int> hosts;
  std::string address;  ///< This host's address for the others; empty if all ranks share a host.
  /// The reason why the program's own library cannot carry messages; see detail::Communicator.
  /// Empty: it can, or there is none.
  std::string refusal = {};
};

/// Throws UsageError unless the time-out is positive.
void check_timeout(std::chrono::milliseconds timeout);

/// Identifies the processes that share a loopback interface: boot id, host name, network namespace.
std::string network_identity();

/// Connects the ranks through a store. Collective; blocks until all ranks have arrived, at most
/// about `timeout`. Throws UsageError for a setting that cannot work, BrokenWorldError naming the
/// ranks that did not arrive. The store is the first of these that applies:
///   1. TESSERA_RENDEZVOUS, a folder given by the launcher (one host): a FileStore in it.
///   2. All ranks are on one host, because the launcher's variables show it, or because
///      MASTER_ADDR is a loopback address and torchrun's agents do not serve the store: a FileStore
///      in a private folder that rank 0 makes and announces under the name of the job or the port.
///      It needs no port, and no torchrun of the same version of PyTorch.
///   3. TORCHELASTIC_USE_AGENT_STORE, torchrun's agent serves the store: every rank connects to
///      MASTER_ADDR:MASTER_PORT.
///      It is c10d's TCPStore, which proves no secret.
///   4. Otherwise rank 0 serves the store at MASTER_ADDR:MASTER_PORT (own_store.h).
StoreRendezvous rendezvous_over_store(const LaunchEnvironment& environment,
                                      std::chrono::milliseconds timeout);

}  // namespace tessera::comm
