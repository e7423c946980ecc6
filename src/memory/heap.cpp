#include "memory/heap.h"

#include <limits>
#include <mutex>

#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory/malloc_allocator.h"

namespace tessera::memory {

#ifdef __GLIBC__

void retain_freed_memory() {
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  use_malloc_for_tensors();
}

void return_freed_memory() {
  // If another allocator serves the process (preloaded, or a sanitizer's), this call initializes
  // glibc's allocator. Two threads must not do that at the same time.
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  ::malloc_trim(0);
}

#else

void retain_freed_memory() {}
void return_freed_memory() {}

#endif

void return_pages(void* memory, int64_t bytes) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page,
             end = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / page *
                   page;
  if (begin >= end) return;
  auto* const pages = reinterpret_cast<void*>(begin);
  // MADV_REMOVE works for shared memory, MADV_DONTNEED for private memory. A failure has no effect.
  if (::madvise(pages, end - begin, MADV_REMOVE) != 0) ::madvise(pages, end - begin, MADV_DONTNEED);
}

}  // namespace tessera::memory
