#include <cstdlib>
#include <memory>
#include <mutex>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/failures/process_failures.h"
#include "comm/group/make_transport.h"
#include "comm/group/process_group_impl.h"
#include "comm/rendezvous/launch_environment.h"
#include "comm/rendezvous/store_rendezvous.h"
#include "memory/heap.h"
#include "tessera/detail/report_to_launcher.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::mutex default_mutex;

std::weak_ptr<ProcessGroup::Impl>& default_group() {
  static auto& group = *new std::weak_ptr<ProcessGroup::Impl>();  // never destroyed
  return group;
}

comm::StoreRendezvous meet(const comm::LaunchEnvironment& environment,
                           std::chrono::milliseconds timeout) {
  try {
    return comm::rendezvous_over_store(environment, timeout);
  } catch (const BrokenWorldError& error) {
    detail::report_broken(error.ranks(), error.what());
    throw;
  }
}

ProcessGroup as_default(ProcessGroup group) {
  std::lock_guard lock(default_mutex);
  default_group() = group.impl();
  return group;
}

}  // namespace

std::optional<ProcessGroup> default_process_group() {
  std::lock_guard lock(default_mutex);
  auto impl = default_group().lock();
  if (!impl) return std::nullopt;
  return ProcessGroup(std::move(impl));
}

ProcessGroup init_process_group(ProcessGroupOptions options) {
  if (options.timeout.count() <= 0) {
    throw UsageError(fmt::format("init_process_group: timeout is {} ms; expected a positive one",
                                 options.timeout.count()));
  }
  auto environment =
      comm::read_launch_environment([](const char* name) { return std::getenv(name); });
  if (environment.size == 1) return as_default(ProcessGroup());

  if (options.retain_freed_memory) memory::retain_freed_memory();
  // Each call makes another world with its own keys. Every rank makes the same number of calls. The
  // number keeps a rank from entering the store of the world before, which rank 0 may not have
  // left.
  static int calls = 0;
  environment.world = calls;
  auto rendezvous = meet(environment, options.timeout);
  auto world = comm::World::start(environment.rank, environment.size, options);
  world.hosts = std::move(rendezvous.hosts);
  world.same_host = comm::all_equal(world.hosts);
  world.address = std::move(rendezvous.address);
  world.store =
      c10::make_intrusive<c10d::PrefixStore>(fmt::format("world{}/", calls++), rendezvous.store);
  world.failures = std::make_shared<comm::ProcessFailures>();
  world.rank_0_serves_store = !environment.agent_store;
  auto transport = comm::make_transport(world);
  return as_default(ProcessGroup(ProcessGroup::Impl::make(std::move(world), std::move(transport))));
}

}  // namespace tessera
