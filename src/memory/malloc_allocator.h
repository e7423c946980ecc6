#pragma once

namespace tessera::memory {

/// [Note: exact fit] libtorch asks for tensors' memory by posix_memalign, for which glibc looks for
/// a free block of the size and the alignment and more: what a tensor of the same size has freed
/// does not do. So memory that is free is passed by, step after step, and the heap spreads. From
/// now on libtorch's memory for CPUs comes from malloc, aligned by hand, and blocks fit again. What
/// was allocated before is freed as before.
///
/// Once a process. Nothing changes where the program has set an allocator of its own, or something
/// else than glibc serves malloc. Returns whether it is so.
bool use_malloc_for_tensors();

}  // namespace tessera::memory
