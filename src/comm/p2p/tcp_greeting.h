#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "comm/store/message.h"

namespace tessera::comm {

/// Where a member listens, and the token with which a connection to it must begin.
struct TcpAddress {
  std::string host, token;
  int port = 0;
};

/// What a connection is for, and the rank that has made it.
struct Greeting {
  enum Kind : int32_t { link, watch };
  int32_t rank = 0;
  Kind kind = link;
};

constexpr size_t kTokenBytes = 32;
constexpr size_t kGreetingBytes = 8 + kTokenBytes + 4 + 4 + kSealBytes;

/// The answer to a greeting that is understood, and its refusal by a rank that has such a
/// connection already, or had one. Without an answer, the rank that has connected does so again.
constexpr char kLinkWelcome = 0x5a, kLinkRefusal = ~kLinkWelcome;

/// The first bytes of a connection: a mark, the token of the rank that accepts, rank, kind, a
/// checksum. The integers have the byte order of this machine, so that another order is not
/// understood.
std::string bytes_of(const Greeting& greeting, const std::string& token);

/// nullopt if these bytes are no greeting, or have another token.
std::optional<Greeting> read_greeting(std::string_view bytes, const std::string& token);

}  // namespace tessera::comm
