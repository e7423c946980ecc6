#include "comm/p2p/tcp_greeting.h"

#include <cstring>

#include "comm/store/message.h"

namespace tessera::comm {
namespace {

constexpr char kMark[8] = {'t', 'e', 's', 's', 'e', 'r', 'a', '2'};

}  // namespace

std::string bytes_of(const Greeting& greeting, const std::string& token) {
  std::string bytes(kMark, sizeof kMark);
  bytes += token;
  bytes.append(reinterpret_cast<const char*>(&greeting.rank), sizeof greeting.rank);
  bytes.append(reinterpret_cast<const char*>(&greeting.kind), sizeof greeting.kind);
  seal(bytes);
  return bytes;
}

std::optional<Greeting> read_greeting(std::string_view bytes, const std::string& token) {
  if (bytes.size() != kGreetingBytes || !is_sealed(bytes) ||
      bytes.substr(0, sizeof kMark) != std::string_view(kMark, 8))
    return std::nullopt;
  if (bytes.substr(sizeof kMark, kTokenBytes) != token) return std::nullopt;
  int32_t rank_and_kind[2];
  std::memcpy(rank_and_kind, bytes.data() + sizeof kMark + kTokenBytes, sizeof rank_and_kind);
  if (rank_and_kind[1] != Greeting::link && rank_and_kind[1] != Greeting::watch)
    return std::nullopt;
  return Greeting{rank_and_kind[0], static_cast<Greeting::Kind>(rank_and_kind[1])};
}

}  // namespace tessera::comm
