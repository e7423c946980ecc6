#pragma once

#include <memory>

#include <c10/core/DeviceType.h>

#include "comm/base/transport.h"

namespace tessera::comm {

/// Collectives on tensors of an accelerator over `host`, the transport of rank `rank` for CPU
/// tensors, through pinned memory: a copy from the device, for which the host waits, the collective
/// of `host`, and a copy to the device, which is issued on the current stream. CPU tensors go to
/// `host` directly. Local.
std::unique_ptr<Transport> make_staged_transport(int rank, at::DeviceType type,
                                                 std::unique_ptr<Transport> host);

}  // namespace tessera::comm
