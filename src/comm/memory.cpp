#include "comm/memory.h"

#include <malloc.h>

#include <limits>

namespace tessera::comm {

#ifdef __GLIBC__

void retain_freed_memory() {
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
}

void return_freed_memory() { ::malloc_trim(0); }

#else

void retain_freed_memory() {}
void return_freed_memory() {}

#endif

}  // namespace tessera::comm
