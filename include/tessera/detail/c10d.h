#pragma once

#include <c10/util/intrusive_ptr.h>

#include "tessera/detail/torch_compat.h"
#include "tessera/process_group.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Makes a group over a c10d backend (c10d::Backend; c10d::ProcessGroup before libtorch 2.0) that
/// the caller has created and connected, for CPU tensors. Local.
///
/// The backend must support send and recv, as Gloo and MPI do, and must not be used by other code
/// at the same time. The group has no store. It therefore cannot be split, and a BrokenWorldError
/// names the rank that this rank waited for, which may itself be a victim of another rank's
/// failure. Throws UsageError when `backend` is null.
///
/// SIGPIPE: Gloo's threads write to sockets in a way that raises this signal when a rank has died.
/// Block it (pthread_sigmask) while you create the backend, or ignore it. Groups that Tessera
/// creates need neither.
ProcessGroup from_c10d(c10::intrusive_ptr<compat::C10dBackend> backend,
                       ProcessGroupOptions options = {});

}  // namespace tessera
#pragma GCC visibility pop
