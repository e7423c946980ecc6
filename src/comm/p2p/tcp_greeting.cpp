#include "comm/p2p/tcp_greeting.h"

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <system_error>

#include <fmt/format.h>
#include <sys/random.h>

#include "comm/base/roll_call.h"
#include "comm/store/addresses.h"
#include "tessera/detail/classic.h"

namespace tessera::comm {
namespace {

constexpr char kMark[8] = {'t', 'e', 's', 's', 'e', 'r', 'a', '2'};

std::string random_token() {
  unsigned char bytes[kTokenBytes / 2];
  if (::getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
    throw std::system_error(errno, std::generic_category(), "getrandom");
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

std::string address_to_listen_at(const World& world) {
  if (world.same_host) return "127.0.0.1";
  const char* const interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (interface && *interface) return address_of_interface(interface, world.rank);
  if (!world.address.empty()) return world.address;
  const auto outward = outward_address();
  return outward.empty() ? "127.0.0.1" : outward;
}

}  // namespace

TcpAddress own_tcp_address(const World& world) {
  return {address_to_listen_at(world), random_token()};
}

std::vector<TcpAddress> exchange_tcp_addresses(const World& world, const TcpAddress& own) {
  const auto deadline = std::chrono::steady_clock::now() + world.options.timeout;
  std::vector<TcpAddress> addresses(world.size);
  for (const auto& [rank, written] :
       roll_call(world.store, "tcp", world.rank, world.size,
                 fmt::format("{} {} {}", own.port, own.token, own.host), deadline)) {
    detail::Classic<std::istringstream> text(written.value);
    text >> addresses[rank].port >> addresses[rank].token >> addresses[rank].host;
  }
  return addresses;
}

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
