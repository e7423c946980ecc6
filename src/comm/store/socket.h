#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <sys/socket.h>
#include <unistd.h>

namespace tessera::comm {

/// Owns a socket. All sockets of this folder are non-blocking and are closed by exec.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

/// True for errors of a socket that may not occur at the next try.
bool is_temporary(int error);

/// Sends small messages without delay, and probes whether the peer's host is still reachable.
void prepare_connection(int fd);

/// Sockets that listen on exactly these numeric addresses, on one port. An address that this host
/// does not have is left out, if it has another of them. Port 0 is for one address. Throws
/// std::system_error.
std::vector<Socket> listen_at(const std::vector<std::string>& addresses, int port);

/// The port on which a socket listens.
int port_of(const Socket& listener);

/// The numeric address of a socket's peer.
std::string peer_of(const Socket& connection);

/// A socket that connects to one numeric address, without waiting for it: the socket is writable
/// when it has connected. Throws std::system_error.
Socket begin_to_connect(const std::string& address, int port);

/// The error of the last operation that ended on a socket, as in errno; 0: none.
int error_of(const Socket& socket);

/// Connects to one numeric address. Throws std::system_error.
Socket connect_to(const std::string& address, int port,
                  std::chrono::steady_clock::time_point deadline);

/// Blocks until the socket has one of `events` of poll(2). False if the deadline passes first.
bool wait_for(const Socket& socket, short events, std::chrono::steady_clock::time_point deadline);

}  // namespace tessera::comm
