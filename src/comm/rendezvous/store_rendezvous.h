#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/rendezvous/launch_environment.h"

namespace tessera::comm {

/// The store through which the ranks of a launch find each other.
struct StoreRendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  std::vector<int>
      hosts;            ///< Of the ranks: equal numbers share a host, that is, loopback and memory.
  std::string address;  ///< This host's, as the others reach it; empty where all share one.
};

/// Blocks until all ranks have arrived. In order:
///   - a folder given by the launcher (TESSERA_RENDEZVOUS): a FileStore in it, one host;
///   - one host (a launcher that says so, or a loopback MASTER_ADDR unless torchrun's agents serve
///   the store): a FileStore in a
///     private folder that rank 0 makes and announces under the job's or the port's name, because
///     c10d's TCPStore listens on every address and takes anyone's keys, and the agent's, where
///     torchrun is another PyTorch's, speaks another protocol;
///   - torchrun's agent's store (TORCHELASTIC_USE_AGENT_STORE): a client of MASTER_ADDR:MASTER_PORT
///   on every rank;
///   - else a TCPStore served by rank 0 at MASTER_ADDR:MASTER_PORT.
StoreRendezvous rendezvous_over_store(const LaunchEnvironment& environment,
                                      std::chrono::milliseconds timeout);

}  // namespace tessera::comm
