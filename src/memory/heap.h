#pragma once

#include <cstdint>

namespace tessera::memory {

/// Implements ProcessGroupOptions::tune_process. Process-wide; no effect without glibc.
void retain_freed_memory();

/// Returns the presently free heap memory to the system, once. For use after a model's parameters
/// have moved into other storage.
void return_freed_memory();

/// Returns the whole pages of [memory, memory + bytes) to the system. Their contents are then
/// unspecified, and the next write allocates new pages. No thread or process may access them during
/// the call.
void return_pages(void* memory, int64_t bytes);

}  // namespace tessera::memory
