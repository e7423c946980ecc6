#pragma once

#include <chrono>
#include <string>

namespace tessera::comm {

/// Returns a fresh folder of this user (mode 0700) that rank 0 makes and that the other ranks with
/// the same `key` on this host find. Blocks until this rank has found it, at most `timeout`. A
/// folder left by a run whose rank 0 is dead is never joined; the next run, of any key, removes it.
/// Throws UsageError on rank 0 when another live run uses the same key or the folder cannot be
/// made, and BrokenWorldError on the other ranks when rank 0 does not arrive.
std::string announced_folder(const std::string& key, int rank, int size,
                             std::chrono::milliseconds timeout);

}  // namespace tessera::comm
