#include "comm/store/serve.h"

#include <cstdio>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "comm/store/addresses.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Not through spdlog: the server's thread may still run when the program's statics are gone.
void print_line(const std::string& line) {
  std::fputs(fmt::format("tessera: {}\n", line).c_str(), stderr);
}

std::vector<std::string> addresses_to_listen_on(const Caller& caller, const std::string& name) {
  auto resolved = resolve_master_address(name, 0, caller);
  for (const auto& address : resolved) {
    if (address == "0.0.0.0" || address == "::")
      throw UsageError(fmt::format(
          "{0}: {1} 0: MASTER_ADDR is '{2}'; expected the address, or a name, of one interface of "
          "the host of {1} 0, at which the other {1}s reach it",
          caller.component, caller.noun, name));
  }
  return listening_addresses(std::move(resolved), outward_address());
}

}  // namespace

ServedStore serve_store(const Caller& caller, const std::string& master_address, int port,
                        const std::string& port_name, Session::Gate gate) {
  ServedStore served;
  served.addresses = addresses_to_listen_on(caller, master_address);
  try {
    served.server = std::make_shared<StoreServer>(
        listen_at(served.addresses, port),
        StoreServer::Options{.gate = std::move(gate), .report = print_line});
  } catch (const std::system_error& error) {
    const bool absent = error.code() == std::errc::address_not_available;
    throw UsageError(fmt::format(
        "{}: {} 0 cannot serve the store at MASTER_ADDR:{} = {}:{} on {}: {}; expected {}",
        caller.component, caller.noun, port_name, master_address, port,
        fmt::join(served.addresses, ", "), error.code().message(),
        absent ? fmt::format("the address, or a name, of an interface of the host of {} 0, on "
                             "which the store listens",
                             caller.noun)
               : "a free port"));
  }
  return served;
}

}  // namespace tessera::comm
