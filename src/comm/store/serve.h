#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/store/caller.h"
#include "comm/store/store_server.h"

namespace tessera::comm {

/// A store that number 0 of its callers serves.
struct ServedStore {
  std::shared_ptr<StoreServer> server;
  std::vector<std::string> addresses;  ///< On which it listens.
};

/// Serves a store at MASTER_ADDR, see listening_addresses(), and on `port`, which the message calls
/// `port_name`. Throws UsageError if the address is no interface of this host, or the port is
/// taken. Warns on standard error of each peer that it refuses.
ServedStore serve_store(const Caller& caller, const std::string& master_address, int port,
                        const std::string& port_name, Session::Gate gate);

}  // namespace tessera::comm
