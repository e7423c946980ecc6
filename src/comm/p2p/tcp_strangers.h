#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "comm/p2p/tcp_greeting.h"
#include "comm/store/socket.h"

namespace tessera::comm {

/// Connections that a member has accepted and that have not greeted it yet, and those that are only
/// watched by the rank that made them. One that greets wrongly, or ends, is closed. At most 64 may
/// be without a greeting; a further one takes the place of the oldest. Not thread-safe; never
/// blocks.
class TcpStrangers {
 public:
  /// `token`: of this member.
  explicit TcpStrangers(std::string token) : token_(std::move(token)) {}

  /// Takes a connection. Returns its number.
  uint32_t add(Socket socket);
  int fd(uint32_t number) const { return strangers_.at(number).socket.fd(); }

  struct Newcomer {
    Greeting greeting;
    Socket socket;
  };
  /// Reads from a connection that has something to read. Returns it when it has greeted as a link.
  /// Numbers that are no longer there are ignored.
  std::optional<Newcomer> read(uint32_t number);

 private:
  struct Stranger {
    Socket socket;
    std::string greeting;  // what has arrived of it
    bool watches = false;
  };

  std::string token_;
  std::map<uint32_t, Stranger> strangers_;
  uint32_t next_ = 0;
};

}  // namespace tessera::comm
