#pragma once

#include <cstdint>
#include <string>

namespace tessera::train {

/// Leaves of a log of JSON lines those of steps below `step`, once each: what a killed run wrote
/// after its checkpoint is written again. No file: nothing. UsageError when it cannot be read or
/// replaced.
void keep_log_before(const std::string& path, int64_t step);

}  // namespace tessera::train
