#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "comm/store/message.h"
#include "comm/store/socket.h"

namespace tessera::comm {

/// Where a member listens, and the token with which a connection to it must begin.
struct TcpAddress {
  std::string host, token;
  int port = 0;
};

/// The purpose of a connection, and the rank that has made it.
struct Greeting {
  enum Kind : int32_t { link, watch };
  int32_t rank = 0;
  Kind kind = link;
};

constexpr size_t kTokenBytes = 32;
constexpr size_t kGreetingBytes = 8 + kTokenBytes + 4 + 4 + kSealBytes;

/// The answer to a greeting that is understood, and its refusal by a rank that has such a
/// connection already, or had one. Without an answer, the rank that has connected connects again.
constexpr char kLinkWelcome = 0x5a, kLinkRefusal = ~kLinkWelcome;

/// The first bytes of a connection: a mark, the token of the rank that accepts, rank, kind, a
/// checksum. The integers have the byte order of this machine, so that another order is not
/// understood.
std::string bytes_of(const Greeting& greeting, const std::string& token);

/// nullopt if these bytes are no greeting, or have another token.
std::optional<Greeting> read_greeting(std::string_view bytes, const std::string& token);

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
  /// Closes connections after their time. Returns the end of the next one's time; max() if there is
  /// none.
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
