#pragma once

#include <chrono>
#include <string>

namespace tessera::comm {

/// A fresh 0700 folder of this user that rank 0 makes and the other ranks of the same `key` find.
/// Blocks. A folder left by a run whose rank 0 is dead is never joined and is swept by the next
/// run, of whatever key; two live runs under one key are an error.
std::string announced_folder(const std::string& key, int rank, int size,
                             std::chrono::milliseconds timeout);

}  // namespace tessera::comm
