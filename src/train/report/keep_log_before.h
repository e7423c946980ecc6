#pragma once

#include <cstdint>
#include <string>

namespace tessera::train {

/// Removes the lines of steps >= `step` and incomplete lines from a log of JSON lines: a resumed
/// run writes the steps after its checkpoint again. Does nothing when the file does not exist.
/// Throws UsageError when it cannot be read or replaced.
void keep_log_before(const std::string& path, int64_t step);

}  // namespace tessera::train
