#include <cstdlib>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/group/make_transport.h"
#include "comm/group/process_group_impl.h"
#include "comm/rendezvous/launch_environment.h"
#include "comm/rendezvous/store_rendezvous.h"
#include "memory/heap.h"
#include "tessera/error.h"

namespace tessera {

ProcessGroup init_process_group(ProcessGroupOptions options) {
  if (options.timeout.count() <= 0) {
    throw UsageError(fmt::format("init_process_group: timeout is {} ms; expected a positive one",
                                 options.timeout.count()));
  }
  const auto environment =
      comm::read_launch_environment([](const char* name) { return std::getenv(name); });
  if (environment.size == 1) return ProcessGroup();

  if (options.retain_freed_memory) memory::retain_freed_memory();
  // Each call makes another world with its own keys. Every rank makes the same number of calls.
  static int calls = 0;
  auto rendezvous = comm::rendezvous_over_store(environment, options.timeout);
  auto world = comm::World::start(environment.rank, environment.size, options);
  world.hosts = std::move(rendezvous.hosts);
  world.same_host = comm::all_equal(world.hosts);
  world.address = std::move(rendezvous.address);
  world.store =
      c10::make_intrusive<c10d::PrefixStore>(fmt::format("world{}/", calls++), rendezvous.store);
  auto transport = comm::make_transport(world);
  return ProcessGroup(std::make_shared<ProcessGroup::Impl>(std::move(world), std::move(transport)));
}

}  // namespace tessera
