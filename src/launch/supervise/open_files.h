#pragma once

#include <cstdint>

#include "tessera/launch.h"

namespace tessera::launch {

/// The largest number of files that the guard and the ranks keep open in the launcher. `merged`:
/// see Console::merged().
int64_t needed_open_files(const LaunchOptions& options, bool merged);

/// Throws UsageError if `ulimit -n` is less than the ranks need. The message gives the required
/// value. Call it before a rank starts.
void check_open_files(const LaunchOptions& options, bool merged);

}  // namespace tessera::launch
