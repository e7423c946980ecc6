#include "comm/p2p/tcp_strangers.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace tessera::comm {
namespace {

constexpr int64_t kMostStrangers = 64;
constexpr std::chrono::seconds kGreetingLimit{2};

}  // namespace

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
