#include "comm/rendezvous/agent_store.h"

#include <memory>
#include <vector>

#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "comm/base/sigpipe_blocked.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Returns a connection with a time-out of 1 s for connecting and 0.1 s for receiving; -1 if no
/// process listens there (yet).
int connect_briefly(const std::string& address, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return -1;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, ::freeaddrinfo);
  constexpr timeval kConnect{1, 0}, kReceive{0, 100'000};
  for (const auto* entry = found; entry; entry = entry->ai_next) {
    const int fd = ::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &kConnect, sizeof kConnect);
    ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &kReceive, sizeof kReceive);
    if (::connect(fd, entry->ai_addr, entry->ai_addrlen) == 0) return fd;
    ::close(fd);
  }
  return -1;
}

/// The reason why the service at this address is not a store; empty if it may be one. A store sends
/// nothing before a request. Unexpected data would end the process: a thread of libtorch 1.13's
/// client reads it and throws.
std::string why_not_a_store(const std::string& address, int port) {
  const int fd = connect_briefly(address, port);
  if (fd < 0) return "";
  char byte;
  const auto received = ::recv(fd, &byte, 1, 0);
  const int error = errno;
  ::close(fd);
  if (received > 0) return "the service there sends data before a request";
  return received == 0 || error == ECONNRESET ? "the service there closes the connection" : "";
}

}  // namespace

void throw_useless_store(const LaunchEnvironment& environment, std::chrono::milliseconds timeout,
                         const std::string& reason) {
  throw BrokenWorldError(
      fmt::format("init_process_group: rank {} of {} could not use the store at "
                  "MASTER_ADDR:MASTER_PORT = {}:{} within {} ms: "
                  "{}; another service{} may answer there",
                  environment.rank, environment.size, environment.master_address,
                  environment.master_port, timeout.count(), reason,
                  environment.agent_store ? ", or the torchrun of another PyTorch," : ""),
      environment.agent_store ? std::vector<int>{} : std::vector<int>{0});
}

c10::intrusive_ptr<c10d::Store> agent_store(const LaunchEnvironment& environment,
                                            std::chrono::milliseconds timeout) {
  auto options = compat::without_libuv(c10d::TCPStoreOptions());
  options.port = static_cast<uint16_t>(environment.master_port);
  options.waitWorkers = false;
  options.timeout =
      std::chrono::ceil<std::chrono::seconds>(timeout);  // libtorch 1.13 uses whole seconds
  if (const auto problem = why_not_a_store(environment.master_address, environment.master_port);
      !problem.empty())
    throw_useless_store(environment, timeout, problem);
  const SigpipeBlocked sigpipe;
  try {
    return c10::make_intrusive<c10d::TCPStore>(environment.master_address, options);
  } catch (const std::exception& error) {
    throw_useless_store(environment, timeout, compat::first_line(error.what()));
  }
}

}  // namespace tessera::comm
