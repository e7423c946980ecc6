#pragma once

#include <cstdint>

namespace tessera::memory {

/// See ProcessGroupOptions::retain_freed_memory.
void retain_freed_memory();

/// Gives what is free now back to the system, once: for after a model's parameters have moved into
/// other storage.
void return_freed_memory();

/// Gives the pages of [memory, memory + bytes) back to the system: their contents are then
/// unspecified, and writing them costs new ones. Nobody may read them at the moment.
void return_pages(void* memory, int64_t bytes);

}  // namespace tessera::memory
