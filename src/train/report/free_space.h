#pragma once

#include <cstdint>
#include <string>

namespace tessera::train {

/// A warning if the file system of `folder` has fewer than `bytes` bytes free for this user; ""
/// otherwise and where that is unknown. `what` names what needs them. A quota is not seen here, and
/// compression is not either, so this is no reason to end a run.
std::string space_warning(const std::string& folder, int64_t bytes, const std::string& what);

}  // namespace tessera::train
