#include "comm/rendezvous/local_place.h"

#include <algorithm>

#include <fmt/format.h>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

LocalPlace place_by_launcher(const World& world, const GetVariable& get) {
  const auto environment = read_launch_environment(get);
  const bool same_ranks = environment.rank == world.rank && environment.size == world.size;
  if (!same_ranks || !environment.local_rank || !environment.local_size) {
    throw UsageError(fmt::format(
        "ProcessGroup: rank {} of {}: the hosts of the ranks are unknown, and the launcher ({}) "
        "does not set rank, world size, local rank and local size of this group; expected the "
        "variables of torchrun or of Open MPI, or a group of init_process_group",
        world.rank, world.size, environment.launcher));
  }
  return {*environment.local_rank, *environment.local_size};
}

}  // namespace

LocalPlace local_place(const World& world, const GetVariable& get) {
  if (world.same_host) return {world.rank, world.size};
  if (world.hosts.empty()) return place_by_launcher(world, get);
  const int host = world.hosts[world.rank];
  const auto begin = world.hosts.begin();
  return {static_cast<int>(std::count(begin, begin + world.rank, host)),
          static_cast<int>(std::count(begin, world.hosts.end(), host))};
}

}  // namespace tessera::comm
