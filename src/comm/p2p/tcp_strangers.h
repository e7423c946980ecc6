#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "comm/p2p/tcp_greeting.h"
#include "comm/store/socket.h"

namespace tessera::comm {

/// Connections that a member has accepted and that have not greeted it yet, and those that are only
/// watched by the rank that made them. One that greets wrongly, or ends, or has not greeted within
/// two seconds is closed without an answer; its rank connects again. At most 64 may be without a
/// greeting; a further one takes the place of the oldest. Not thread-safe; never blocks.
class TcpStrangers {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// `token`: of this member.
  explicit TcpStrangers(std::string token) : token_(std::move(token)) {}

  /// Takes a connection. Returns its number.
  uint32_t add(Socket socket, TimePoint now);
  int fd(uint32_t number) const { return strangers_.at(number).socket.fd(); }

  struct Newcomer {
    Greeting greeting;
    Socket socket;
  };
  /// Reads from a connection that may have something to read. Returns it when it has greeted as a
  /// link. Numbers that are no longer there are ignored.
  std::optional<Newcomer> read(uint32_t number);

  /// Closes the oldest connection without a greeting. False if there is none.
  bool close_oldest();
  /// Closes those whose time has passed. Returns when the next one's does; max() if there is none.
  TimePoint close_late(TimePoint now);

 private:
  struct Stranger {
    Socket socket;
    TimePoint since;
    std::string greeting;  // what has arrived of it
    bool watches = false;
  };
  using Strangers = std::map<uint32_t, Stranger>;  // by age

  Strangers::iterator oldest();

  std::string token_;
  Strangers strangers_;
  uint32_t next_ = 0;
};

}  // namespace tessera::comm
