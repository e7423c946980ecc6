#pragma once

#include <c10/util/intrusive_ptr.h>

#include "tessera/detail/torch_compat.h"
#include "tessera/process_group.h"

namespace tessera {

/// A group over a c10d backend (c10d::Backend; c10d::ProcessGroup before libtorch 2.0) that the
/// caller made and connected, for CPU tensors. It must offer send and recv; Gloo and MPI do. Nobody
/// else may use it at the same time. Local. The group cannot be split, and an error names the rank
/// that was waited for, which may itself be a victim: there is no store to ask. UsageError when
/// null. Gloo's own threads write to sockets in a way that raises SIGPIPE when a rank has died:
/// block it (pthread_sigmask) while you make the backend, or ignore it; groups that Tessera makes
/// need nothing.
ProcessGroup from_c10d(c10::intrusive_ptr<compat::C10dBackend> backend,
                       ProcessGroupOptions options = {});

}  // namespace tessera
