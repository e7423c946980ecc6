#include "comm/p2p/tcp_strangers.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace tessera::comm {
namespace {

constexpr char kMark[8] = {'t', 'e', 's', 's', 'e', 'r', 'a', '2'};
constexpr int64_t kMostStrangers = 64;
constexpr std::chrono::seconds kGreetingLimit{2};

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

TcpStrangers::Strangers::iterator TcpStrangers::oldest() {
  return std::find_if(strangers_.begin(), strangers_.end(),
                      [](const auto& entry) { return !entry.second.watches; });
}

bool TcpStrangers::close_oldest() {
  const auto found = oldest();
  if (found == strangers_.end()) return false;
  strangers_.erase(found);
  return true;
}

TcpStrangers::TimePoint TcpStrangers::close_late(TimePoint now) {
  auto found = oldest();
  for (; found != strangers_.end() && now >= found->second.since + kGreetingLimit; found = oldest())
    strangers_.erase(found);
  return found == strangers_.end() ? TimePoint::max() : found->second.since + kGreetingLimit;
}

uint32_t TcpStrangers::add(Socket socket, TimePoint now) {
  const auto is_new = [](const auto& entry) { return !entry.second.watches; };
  if (std::count_if(strangers_.begin(), strangers_.end(), is_new) >= kMostStrangers) close_oldest();
  auto& stranger = strangers_[next_];
  stranger.socket = std::move(socket);
  stranger.since = now;
  return next_++;
}

std::optional<TcpStrangers::Newcomer> TcpStrangers::read(uint32_t number) {
  const auto found = strangers_.find(number);
  if (found == strangers_.end()) return std::nullopt;
  auto& stranger = found->second;
  char bytes[kGreetingBytes];
  const size_t left = stranger.watches ? 1 : kGreetingBytes - stranger.greeting.size();
  const auto got = ::recv(stranger.socket.fd(), bytes, left, MSG_DONTWAIT);
  if (got < 0 && is_temporary(errno)) return std::nullopt;
  std::optional<Greeting> greeting;
  if (got > 0 && !stranger.watches) {
    stranger.greeting.append(bytes, static_cast<size_t>(got));
    if (stranger.greeting.size() < kGreetingBytes) return std::nullopt;
    greeting = read_greeting(stranger.greeting, token_);
  }
  if (greeting && greeting->kind == Greeting::watch) {
    stranger.watches = true;
    ::send(stranger.socket.fd(), &kLinkWelcome, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    return std::nullopt;
  }
  std::optional<Newcomer> newcomer;
  if (greeting) newcomer = Newcomer{*greeting, std::move(stranger.socket)};
  strangers_.erase(found);
  return newcomer;
}

}  // namespace tessera::comm
