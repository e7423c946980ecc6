#pragma once

namespace tessera::memory {

/// Makes libtorch allocate CPU tensors with malloc, aligned by this library. Earlier memory is
/// freed as before. Takes effect once in a process; later calls return the first result. Returns
/// false and changes nothing if the program has set a CPU allocator of its own, or if malloc is not
/// glibc's.
///
/// [Note: exact fit] libtorch allocates tensors with posix_memalign. glibc then searches for a free
/// block of size + alignment + overhead, so it cannot reuse a block freed by a tensor of the same
/// size. Free memory is skipped on every step and the heap fragments. With malloc, a freed block
/// fits the next tensor of the same size.
bool use_malloc_for_tensors();

}  // namespace tessera::memory
