#pragma once

#include <memory>

#include "comm/base/transport.h"
#include "comm/base/world.h"

namespace tessera::comm {

/// Connects the members of `world` through the backend that `world.options.backend` names.
/// Backend::Auto: shared memory where all members are on one host and can map each other's memory;
/// shared memory within hosts and Gloo between them where some of several hosts have several
/// members; else Gloo. A warning gives the reason if memory cannot be shared. Sets `world.arena` if
/// it is null. Collective. Throws UsageError when the backend cannot be used, BrokenWorldError when
/// members do not arrive.
std::unique_ptr<Transport> make_transport(World& world);

}  // namespace tessera::comm
