#pragma once

#include <cstdint>

#include "tessera/launch.h"

namespace tessera::launch {

/// How many files the guard and the ranks keep open in the launcher at most. `merged`: its standard
/// output and error are one file.
int64_t needed_open_files(const LaunchOptions& options, bool merged);

/// Throws UsageError before anything starts when `ulimit -n` is less than the ranks need; it names
/// what would be enough.
void check_open_files(const LaunchOptions& options, bool merged);

}  // namespace tessera::launch
