#pragma once

#include <chrono>
#include <stdexcept>
#include <string>

#include "comm/store/addresses.h"
#include "comm/store/message.h"
#include "comm/store/socket.h"

namespace tessera::comm {

/// The address of the store, and the rank that connects.
struct StorePlace {
  std::string address;  ///< MASTER_ADDR
  int port = 0;         ///< MASTER_PORT
  int rank = 0, size = 1;
  int attempt = 0;
  std::string secret;  ///< empty: none
  Caller caller = {};
  int world = 0;  ///< See Hello.
};

/// The store cannot be used, for the reason in what().
class StoreLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The host of the store answers, and no process listens there.
class StoreClosed : public StoreLost {
 public:
  using StoreLost::StoreLost;
};

/// One connection to the store whose two ends have proved the secret to each other.
class StoreLink {
 public:
  /// Connects. Temporary failures are tried again until the deadline: no process that listens, a
  /// connection that is closed or not answered, a store of an earlier attempt or world. With
  /// `must_listen`, a store that does not listen is an error at once. Throws StoreLost; StoreClosed
  /// if no process listens, with `must_listen`; UsageError
  /// at once if MASTER_ADDR is unknown, or if the store has another secret, or a later attempt or
  /// world.
  StoreLink(const StorePlace& place, std::chrono::steady_clock::time_point deadline,
            bool must_listen);

  /// Sends a request and returns the reply. After an error the connection must not be used. Throws
  /// StoreLost, also when the deadline passes.
  StoreMessage call(const StoreMessage& request, std::chrono::steady_clock::time_point deadline);

 private:
  Socket socket_;
};

}  // namespace tessera::comm
