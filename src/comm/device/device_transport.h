#pragma once

#include <memory>

#include "comm/base/transport.h"
#include "comm/base/world.h"

namespace tessera::comm {

/// Collectives on tensors of an accelerator over `world.device`, on the current stream of the
/// calling thread: they are issued in order and never block the host. `control` is a transport of
/// the same ranks for CPU tensors. It carries headers, texts and all other CPU tensors. One thread
/// may use it while another issues collectives on the device. Collective: blocks until all members
/// have connected. Throws BrokenWorldError when they cannot.
std::unique_ptr<Transport> make_device_transport(const World& world,
                                                 std::unique_ptr<Transport> control);

}  // namespace tessera::comm
