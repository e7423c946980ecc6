#include <cstdlib>
#include <string>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/base/sigpipe_blocked.h"
#include "comm/p2p/c10d_mailbox.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::comm {

std::unique_ptr<Mailbox> make_gloo_mailbox(const World& world) {
  using Gloo = c10d::ProcessGroupGloo;
  const SigpipeBlocked sigpipe;
  try {
    auto options = Gloo::Options::create(world.options.timeout);
    const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
    if (world.same_host) options->devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
    else if (interface && *interface)
      options->devices.push_back(Gloo::createDeviceForInterface(interface));
    else if (!world.address.empty())
      options->devices.push_back(Gloo::createDeviceForHostname(world.address));
    else options->devices.push_back(Gloo::createDefaultDevice());
    options->threads = 1;
    return make_c10d_mailbox(
        "gloo", c10::make_intrusive<Gloo>(world.store, world.rank, world.size, options));
  } catch (const std::exception& error) {
    throw BrokenWorldError(fmt::format("ProcessGroup: rank {} of {} could not connect to the other "
                                       "ranks through Gloo within {} ms: {}",
                                       world.rank, world.size, world.options.timeout.count(),
                                       compat::first_line(error.what())),
                           {});
  }
}

std::unique_ptr<Mailbox> make_default_mailbox(const World& world) {
  if (world.options.backend == Backend::MPI || world.start_group.communicator)
    return make_communicator_mailbox(world);
  const char* const transport = std::getenv("GLOO_DEVICE_TRANSPORT");
  const bool other = transport && *transport && std::string(transport) != "TCP";
  return other ? make_gloo_mailbox(world) : make_tcp_mailbox(world);
}

}  // namespace tessera::comm
