#pragma once

#include <functional>

#include "tessera/c.h"
#include "tessera/process_group.h"

#pragma GCC visibility push(default)
namespace tessera::detail {

/// For files that make groups of the C interface in another way, such as from an MPI_Comm. The
/// caller frees it by tessera_group_free(). Local.
tessera_group* c_group(ProcessGroup group);
/// Calls `body`, and returns the code of the exception that leaves it, or TESSERA_OK. Local.
int c_call(const std::function<void()>& body);

}  // namespace tessera::detail
#pragma GCC visibility pop
