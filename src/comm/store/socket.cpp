#include "comm/store/socket.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

namespace tessera::comm {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

[[noreturn]] void refuse(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

AddressList numeric(const std::string& address, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
    refuse(EINVAL, address);
  return {found, ::freeaddrinfo};
}

Socket stream_socket(int family) {
  Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.fd() < 0) refuse(errno, "socket");
  return socket;
}

Socket listener(const std::string& address, int port) {
  const auto target = numeric(address, port);
  Socket socket = stream_socket(target->ai_family);
  constexpr int kOn = 1, kBacklog = 4096;
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &kOn, sizeof kOn);
  if (target->ai_family == AF_INET6)
    ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &kOn, sizeof kOn);
  if (::bind(socket.fd(), target->ai_addr, target->ai_addrlen) != 0 ||
      ::listen(socket.fd(), kBacklog) != 0)
    refuse(errno, address);
  return socket;
}

bool is_not_here(int error) {
  return error == EADDRNOTAVAIL || error == EAFNOSUPPORT || error == ENODEV;
}

}  // namespace

bool is_temporary(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

void prepare_connection(int fd) {
  constexpr int kOn = 1, kIdleSeconds = 30, kIntervalSeconds = 10, kProbes = 3;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &kOn, sizeof kOn);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &kOn, sizeof kOn);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kIdleSeconds, sizeof kIdleSeconds);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kIntervalSeconds, sizeof kIntervalSeconds);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof kProbes);
}

std::vector<Socket> listen_at(const std::vector<std::string>& addresses, int port) {
  std::vector<Socket> listeners;
  std::error_code absent;
  for (const auto& address : addresses) {
    try {
      listeners.push_back(listener(address, port));
    } catch (const std::system_error& error) {
      if (!is_not_here(error.code().value())) throw;
      absent = error.code();
    }
  }
  if (listeners.empty()) throw std::system_error(absent);
  return listeners;
}

int port_of(const Socket& listener) {
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  ::getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&own), &size);
  return ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&own)->sin6_port
                                         : reinterpret_cast<sockaddr_in*>(&own)->sin_port);
}

std::string peer_of(const Socket& connection) {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  char text[NI_MAXHOST] = {};
  auto* const any = reinterpret_cast<sockaddr*>(&peer);
  const bool known = ::getpeername(connection.fd(), any, &size) == 0 &&
                     ::getnameinfo(any, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0;
  return known ? text : "an unknown address";
}

Socket begin_to_connect(const std::string& address, int port) {
  const auto target = numeric(address, port);
  Socket socket = stream_socket(target->ai_family);
  if (::connect(socket.fd(), target->ai_addr, target->ai_addrlen) != 0 && errno != EINPROGRESS)
    refuse(errno, address);
  return socket;
}

int error_of(const Socket& socket) {
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

Socket connect_to(const std::string& address, int port,
                  std::chrono::steady_clock::time_point deadline) {
  Socket socket = begin_to_connect(address, port);
  if (!wait_for(socket, POLLOUT, deadline)) refuse(ETIMEDOUT, address);
  if (const int error = error_of(socket)) refuse(error, address);
  prepare_connection(socket.fd());
  return socket;
}

bool wait_for(const Socket& socket, short events, std::chrono::steady_clock::time_point deadline) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kLongest{60'000};
  for (pollfd entry{socket.fd(), events, 0};;) {
    auto left = kLongest;
    if (deadline != Clock::time_point::max())
      left = std::clamp(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()),
                        std::chrono::milliseconds(0), kLongest);
    const int ready = ::poll(&entry, 1, static_cast<int>(left.count()));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) refuse(errno, "poll");
    if (Clock::now() >= deadline) return false;
  }
}

}  // namespace tessera::comm
