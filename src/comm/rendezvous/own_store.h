#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/rendezvous/launch_environment.h"
#include "comm/store/store_server.h"

namespace tessera::comm {

/// The store that rank 0 serves for a world over hosts, and rank 0's information about it.
struct OwnStore {
  c10::intrusive_ptr<c10d::Store> store;
  /// Rank 0 alone: the store's addresses and refused peers, to complete an error message.
  std::function<std::string()> remark = [] { return std::string(); };
};

/// Serves the store on rank 0, on the addresses that MASTER_ADDR has there and on MASTER_PORT, and
/// connects to it. The secret is that of TESSERA_SECRET or TESSERA_SECRET_FILE; without one, rank 0
/// warns. Blocks until rank 0 serves, at most `timeout`. Throws UsageError for a setting that
/// cannot work, and for another secret than rank 0's; BrokenWorldError if no store answers.
OwnStore own_store(const LaunchEnvironment& environment, std::chrono::milliseconds timeout);

}  // namespace tessera::comm
