#include "comm/memory.h"

#include <malloc.h>

#include <limits>
#include <mutex>

namespace tessera::comm {

#ifdef __GLIBC__

void retain_freed_memory() {
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
}

void return_freed_memory() {
  // Where another allocator serves the process (preloaded, or a sanitizer's), this call is what first starts glibc's, which two
  // threads must not do at once.
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  ::malloc_trim(0);
}

#else

void retain_freed_memory() {}
void return_freed_memory() {}

#endif

}  // namespace tessera::comm
