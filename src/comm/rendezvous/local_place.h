#pragma once

#include "comm/base/world.h"
#include "comm/rendezvous/launch_environment.h"

namespace tessera::comm {

/// The place of this process among the group's members on its host.
struct LocalPlace {
  int rank = 0;
  int size = 1;
};

/// From the members' hosts. Where the hosts are unknown (groups of from_c10d), from the launcher's
/// variables that `get` returns, provided that the launcher started exactly the members of this
/// group under the same ranks. Throws UsageError when neither gives an answer.
LocalPlace local_place(const World& world, const GetVariable& get);

}  // namespace tessera::comm
