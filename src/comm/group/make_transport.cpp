#include "comm/group/make_transport.h"

#include <algorithm>
#include <mutex>
#include <set>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/device/device_transport.h"
#include "comm/device/nccl_backend.h"
#include "comm/device/staged_transport.h"
#include "comm/hosts/message_transport.h"
#include "comm/p2p/mailbox.h"
#include "comm/shm/shm_arena.h"
#include "comm/shm/shm_setup.h"
#include "tessera/detail/report_to_launcher.h"
#include "tessera/error.h"

namespace tessera::comm {

namespace {

/// Several hosts, one of which has several ranks.
bool has_two_levels(const World& world) {
  const std::set<int> hosts(world.hosts.begin(), world.hosts.end());
  return !world.same_host && hosts.size() > 1 && hosts.size() < world.hosts.size();
}

std::unique_ptr<Transport> connect(const World& world);

/// A transport for CPU tensors, and beside it one for the accelerator's.
std::unique_ptr<Transport> connect_device(const World& world) {
  World host = world;
  host.device = nullptr;
  host.options.backend = Backend::Auto;
  host.store = c10::make_intrusive<c10d::PrefixStore>("control/", world.store);
  return make_device_transport(world, connect(host));
}

/// A transport for CPU tensors, which carries those of the accelerator too.
std::unique_ptr<Transport> connect_staged(const World& world) {
  const auto type = world.options.staged_device;
  const auto refuse = [&](const std::string& problem) {
    throw UsageError(fmt::format("ProcessGroup: rank {}: staged_device is {}{}", world.rank,
                                 c10::DeviceTypeName(type, true), problem));
  };
  if (world.options.backend == Backend::NCCL)
    refuse(", and the backend is NCCL; expected another backend, or no staged_device");
  if (!c10::impl::hasDeviceGuardImpl(type) || c10::impl::VirtualGuardImpl(type).deviceCount() == 0)
    refuse(", and this process sees no such device; expected the type of one that it sees");
  static std::once_flag warned;
  if (world.rank == 0) {
    std::call_once(warned, [&] {
      const auto& reason = world.staged_because;
      spdlog::warn("tessera: collectives on {} copy through the host's memory{}{}",
                   c10::DeviceTypeName(type, true), reason.empty() ? "" : ", because ", reason);
    });
  }
  World host = world;
  host.options.staged_device = at::kCPU;
  return make_staged_transport(world.rank, type, connect(host));
}

std::unique_ptr<Transport> connect(const World& world) {
  if (world.device) return connect_device(world);
  if (world.options.staged_device != at::kCPU) return connect_staged(world);
  const auto backend = world.options.backend;
  if (world.wire != WireFormat::float32) {
    std::string reason;
    if (auto transport = make_hosts_transport(world, reason)) return transport;
    throw UsageError(
        fmt::format("ProcessGroup.with_wire: rank {}: {} needs shared memory within each host: {}",
                    world.rank, to_string(world.wire), reason));
  }
  if (backend == Backend::NCCL) {
    World with_device = world;
    with_device.device = nccl_backend(world);
    return connect_device(with_device);
  }
  if (backend == Backend::Gloo) return make_message_transport(world, make_gloo_mailbox(world));
  if (backend == Backend::TCP) return make_message_transport(world, make_tcp_mailbox(world));
  std::string reason = "its ranks are on several hosts";
  std::unique_ptr<Transport> shared;
  if (backend == Backend::MPI && world.same_host)
    return make_message_transport(world, make_communicator_mailbox(world));
  if (world.same_host) shared = make_shm_transport(world, reason);
  if (shared) return shared;
  if (backend == Backend::SharedMemory) {
    throw UsageError(fmt::format("ProcessGroup: rank {}: backend SharedMemory cannot be used: {}",
                                 world.rank, reason));
  }
  if ((backend == Backend::Auto || backend == Backend::MPI) && has_two_levels(world)) {
    if (auto two_levels = make_hosts_transport(world, reason)) return two_levels;
    if (world.rank == 0) {
      spdlog::warn("tessera: using messages within the hosts instead of shared memory, because {}",
                   reason);
    }
  }
  if (world.same_host && world.rank == 0)
    spdlog::warn("tessera: using messages instead of shared memory, because {}", reason);
  return make_message_transport(world, make_default_mailbox(world));
}

}  // namespace

std::unique_ptr<Transport> make_transport(World& world) {
  if (!world.arena) world.arena = std::make_shared<ShmArena>();
  try {
    return connect(world);
  } catch (const BrokenWorldError& error) {
    detail::report_broken(world.in_world(error.ranks()), error.what());
    throw;
  }
}

}  // namespace tessera::comm
