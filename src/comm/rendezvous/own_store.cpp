#include "comm/rendezvous/own_store.h"

#include <cstdlib>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include "comm/rendezvous/agent_store.h"
#include "comm/store/secret.h"
#include "comm/store/verified_store.h"
#include "tessera/error.h"

namespace tessera::comm {

OwnStore own_store(const LaunchEnvironment& environment, std::chrono::milliseconds timeout) {
  const auto secret =
      read_secret([](const char* name) { return std::getenv(name); }, environment.rank);
  OwnStore own;
  std::shared_ptr<StoreServer> server;
  if (environment.rank == 0) {
    auto served =
        serve_store({}, environment.master_address, environment.master_port, "MASTER_PORT",
                    {environment.attempt, secret, "rank", environment.world});
    server = std::move(served.server);
    const auto addresses = std::move(served.addresses);
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
    own.store = c10::make_intrusive<VerifiedStore>(StorePlace{environment.master_address,
                                                              environment.master_port,
                                                              environment.rank,
                                                              environment.size,
                                                              environment.attempt,
                                                              secret,
                                                              {},
                                                              environment.world},
                                                   timeout, std::move(server));
  } catch (const StoreLost& error) {
    throw_useless_store(environment, timeout, error.what());
  }
  return own;
}

}  // namespace tessera::comm
