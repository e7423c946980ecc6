#include "sim/wire.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include <sys/socket.h>
#include <sys/un.h>

namespace tessera::sim {
namespace {

constexpr size_t kMostAhead = 1 << 20;  // bytes on the way: more stay with the sender

socklen_t fill(sockaddr_un& address, const std::string& path) {
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, path.data(), path.size());  // after a zero: abstract
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
}

comm::Socket unix_socket() {
  return comm::Socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

}  // namespace

comm::Socket listen_at_path(const std::string& path) {
  auto socket = unix_socket();
  sockaddr_un address{};
  const auto size = fill(address, path);
  if (::bind(socket.fd(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::listen(socket.fd(), 1000) != 0)
    throw std::runtime_error("cannot listen at " + path + ": " + std::strerror(errno));
  return socket;
}

comm::Socket connect_to_path(const std::string& path) {
  auto socket = unix_socket();
  sockaddr_un address{};
  const auto size = fill(address, path);
  if (::connect(socket.fd(), reinterpret_cast<sockaddr*>(&address), size) != 0) return {};
  return socket;
}

Wire::Wire(comm::Socket near, std::string listener, int from_rank, int to_rank, Fault fault)
    : from(from_rank), to(to_rank), listener_(std::move(listener)), fault_(fault) {
  ends_[0] = std::move(near);
}

void Wire::cut() {
  closed_ = true;
  ends_[0] = comm::Socket();
  ends_[1] = comm::Socket();
  for (auto& pieces : pieces_) pieces.clear();
}

bool Wire::take(int direction, TimePoint now, Dice& dice) {
  auto& from_end = ends_[direction];
  if (from_end.fd() < 0 || ended_[direction]) return false;
  size_t ahead = 0;
  for (const auto& piece : pieces_[direction]) ahead += piece.bytes.size();
  if (ahead >= kMostAhead) return false;
  static char buffer[1 << 18];
  const auto most = dice.one_in(3) ? dice.between(1, 40) : dice.between(1, sizeof buffer);
  const auto got = ::recv(from_end.fd(), buffer, static_cast<size_t>(most), MSG_DONTWAIT);
  if (got < 0 && comm::is_temporary(errno)) return false;
  std::string bytes(buffer, static_cast<size_t>(std::max<ssize_t>(got, 0)));
  auto& carried = carried_[direction];
  const auto size = static_cast<int64_t>(bytes.size());
  if (!struck_ && fault_.kind != Fault::none && fault_.direction == direction &&
      carried + size > fault_.at) {
    struck_ = true;
    if (fault_.kind == Fault::cut) {
      cut();
      return true;
    }
    bytes[static_cast<size_t>(fault_.at - carried)] ^= static_cast<char>(1 << dice.below(8));
  }
  carried += size;
  ended_[direction] = got <= 0;
  const auto delay = milliseconds(dice.one_in(20) ? dice.between(0, 3000) : dice.between(0, 5));
  last_[direction] = std::max(last_[direction], now + delay);
  pieces_[direction].push_back({last_[direction], std::move(bytes), got <= 0});
  return true;
}

bool Wire::deliver(int direction, TimePoint now, Dice& dice) {
  auto& pieces = pieces_[direction];
  if (pieces.empty() || pieces.front().at > now) return false;
  auto& end = ends_[1 - direction];
  auto& piece = pieces.front();
  if (piece.end) {
    cut();  // a rank closes both directions at once
    return true;
  }
  const auto most = dice.one_in(4) ? static_cast<size_t>(dice.between(1, 30)) : piece.bytes.size();
  const auto sent = ::send(end.fd(), piece.bytes.data(), std::min(most, piece.bytes.size()),
                           MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0 && comm::is_temporary(errno)) return false;
  if (sent < 0) {
    // What this end has sent before is still on the way to the other one.
    ended_[direction] = true;
    pieces.clear();
    return true;
  }
  piece.bytes.erase(0, static_cast<size_t>(sent));
  if (piece.bytes.empty()) pieces.pop_front();
  return true;
}

bool Wire::move(TimePoint now, Dice& dice) {
  if (closed_) return false;
  if (!connected_) {
    connected_ = true;
    ends_[1] = connect_to_path(listener_);
    if (ends_[1].fd() < 0) {
      cut();
      return true;
    }
  }
  bool moved = false;
  for (const int direction : {0, 1}) {
    if (!closed_) moved = take(direction, now, dice) || moved;
    if (!closed_) moved = deliver(direction, now, dice) || moved;
  }
  return moved;
}

TimePoint Wire::next() const {
  auto result = TimePoint::max();
  for (const auto& pieces : pieces_)
    if (!closed_ && !pieces.empty()) result = std::min(result, pieces.front().at);
  return result;
}

}  // namespace tessera::sim
