// For LD_PRELOAD: a system whose pages have 64 KiB, as many kernels for aarch64 have. sysconf()
// says so, new mappings start at multiples of a page, lengths are rounded up to whole pages, and an
// address within a page is refused and reported. What the C library maps for itself is not seen.
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr uintptr_t kPage = 64 << 10;
constexpr int kPageOfSystem = 4096;

uintptr_t address_of(const void* place) { return reinterpret_cast<uintptr_t>(place); }

size_t whole(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

bool refuse(const char* call, const void* place) {
  if (address_of(place) % kPage == 0) return false;
  std::fprintf(stderr, "pages_64k: %s(%p): no multiple of 65536\n", call, place);
  errno = EINVAL;
  return true;
}

void* map(void* place, size_t bytes, int protection, int flags, int fd, off_t offset) {
  return reinterpret_cast<void*>(syscall(SYS_mmap, place, bytes, protection, flags, fd, offset));
}

}  // namespace

extern "C" {

long sysconf(int name) {
  static const auto next = reinterpret_cast<long (*)(int)>(dlsym(RTLD_NEXT, "sysconf"));
  return name == _SC_PAGESIZE ? static_cast<long>(kPage) : next(name);
}

int getpagesize() { return static_cast<int>(kPage); }

void* mmap(void* place, size_t bytes, int protection, int flags, int fd, off_t offset) {
  const bool fixed = (flags & (MAP_FIXED | MAP_FIXED_NOREPLACE)) != 0;
  if (refuse("mmap's offset", reinterpret_cast<void*>(offset)) || (fixed && refuse("mmap", place)))
    return MAP_FAILED;
  bytes = whole(bytes);
  if (fixed || bytes == 0) return map(place, bytes, protection, flags, fd, offset);
  constexpr int kReserve = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  auto* const room = static_cast<char*>(map(nullptr, bytes + kPage, PROT_NONE, kReserve, -1, 0));
  if (room == MAP_FAILED) return MAP_FAILED;
  const size_t before = -address_of(room) & (kPage - 1);
  void* const data = map(room + before, bytes, protection, flags | MAP_FIXED, fd, offset);
  const int error = errno;
  if (data == MAP_FAILED) {
    syscall(SYS_munmap, room, bytes + kPage);
  } else {
    if (before > 0) syscall(SYS_munmap, room, before);
    syscall(SYS_munmap, room + before + bytes, kPage - before);
  }
  errno = error;
  return data;
}

void* mmap64(void* place, size_t bytes, int protection, int flags, int fd, off_t offset) {
  return mmap(place, bytes, protection, flags, fd, offset);
}

int munmap(void* place, size_t bytes) {
  if (refuse("munmap", place)) return -1;
  return static_cast<int>(syscall(SYS_munmap, place, whole(bytes)));
}

int mprotect(void* place, size_t bytes, int protection) {
  if (refuse("mprotect", place)) return -1;
  return static_cast<int>(syscall(SYS_mprotect, place, whole(bytes), protection));
}

int madvise(void* place, size_t bytes, int advice) {
  if (refuse("madvise", place)) return -1;
  return static_cast<int>(syscall(SYS_madvise, place, whole(bytes), advice));
}

int mincore(void* place, size_t bytes, unsigned char* present) {
  if (refuse("mincore", place)) return -1;
  constexpr size_t kParts = kPage / kPageOfSystem;
  std::vector<unsigned char> parts(whole(bytes) / kPageOfSystem);
  const long result = syscall(SYS_mincore, place, whole(bytes), parts.data());
  for (size_t page = 0; result == 0 && page < parts.size() / kParts; ++page) {
    present[page] = 0;
    for (size_t k = 0; k < kParts; ++k) present[page] |= parts[page * kParts + k];
  }
  return static_cast<int>(result);
}

void* mremap(void* place, size_t bytes, size_t new_bytes, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  void* const to = (flags & MREMAP_FIXED) != 0 ? va_arg(arguments, void*) : nullptr;
  va_end(arguments);
  if (refuse("mremap", place) || refuse("mremap's target", to)) return MAP_FAILED;
  return reinterpret_cast<void*>(
      syscall(SYS_mremap, place, whole(bytes), whole(new_bytes), flags, to));
}

}  // extern "C"
