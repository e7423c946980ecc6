#include "comm/rendezvous/own_store.h"

#include <cstdio>
#include <cstdlib>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include "comm/rendezvous/agent_store.h"
#include "comm/store/addresses.h"
#include "comm/store/secret.h"
#include "comm/store/verified_store.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Not through spdlog: the server's thread may still run when the program's statics are gone.
void print_line(const std::string& line) {
  std::fputs(fmt::format("tessera: {}\n", line).c_str(), stderr);
}

[[noreturn]] void cannot_serve(const LaunchEnvironment& environment,
                               const std::vector<std::string>& addresses,
                               const std::error_code& error) {
  const bool absent = error == std::errc::address_not_available;
  throw UsageError(fmt::format(
      "init_process_group: rank 0 cannot serve the store at MASTER_ADDR:MASTER_PORT = {}:{} on "
      "{}: {}; expected {}",
      environment.master_address, environment.master_port, fmt::join(addresses, ", "),
      error.message(),
      absent ? "the address, or a name, of an interface of the host of rank 0, on which the store "
               "listens"
             : "a free port"));
}

std::vector<std::string> addresses_to_listen_on(const LaunchEnvironment& environment) {
  auto resolved = resolve_master_address(environment.master_address, environment.rank);
  for (const auto& address : resolved) {
    if (address == "0.0.0.0" || address == "::")
      throw UsageError(fmt::format(
          "init_process_group: rank 0: MASTER_ADDR is '{}'; expected the address, or a name, of "
          "one interface of the host of rank 0, at which the other ranks reach it",
          environment.master_address));
  }
  return listening_addresses(std::move(resolved), outward_address());
}

}  // namespace

OwnStore own_store(const LaunchEnvironment& environment, std::chrono::milliseconds timeout) {
  const auto secret =
      read_secret([](const char* name) { return std::getenv(name); }, environment.rank);
  OwnStore own;
  std::shared_ptr<StoreServer> server;
  if (environment.rank == 0) {
    const auto addresses = addresses_to_listen_on(environment);
    try {
      server = std::make_shared<StoreServer>(
          listen_at(addresses, environment.master_port),
          StoreServer::Options{.gate = {environment.attempt, secret}, .report = print_line});
    } catch (const std::system_error& error) {
      cannot_serve(environment, addresses, error.code());
    }
    if (secret.empty())
      spdlog::warn(
          "tessera: anyone who reaches {}:{} can join this world, because it has no secret; set "
          "TESSERA_SECRET, or TESSERA_SECRET_FILE to a file of mode 0600, on every rank",
          fmt::join(addresses, " or "), environment.master_port);
    own.remark = [server, addresses] {
      auto text = fmt::format("; the store listens on {}", fmt::join(addresses, " and "));
      for (const auto& line : server->reported()) text += "; " + line;
      return text;
    };
  }
  try {
    own.store = c10::make_intrusive<VerifiedStore>(
        StorePlace{environment.master_address, environment.master_port, environment.rank,
                   environment.size, environment.attempt, secret},
        timeout, std::move(server));
  } catch (const StoreLost& error) {
    throw_useless_store(environment, timeout, error.what());
  }
  return own;
}

}  // namespace tessera::comm
