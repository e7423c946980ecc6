#include "deferred/mapping.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tessera/error.h"

namespace tessera::deferred {
namespace {

constexpr size_t kHugePagesFrom = 4 << 20;

size_t page() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

void check(bool done, const char* call, size_t bytes) {
  if (done) return;
  throw Error(
      fmt::format("deferred_init: {} of {} bytes failed: {}", call, bytes, std::strerror(errno)));
}

}  // namespace

Mapping::Mapping(size_t bytes) : bytes_((bytes + page() - 1) / page() * page()) {
  void* const memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  check(memory != MAP_FAILED, "mmap", bytes_);
  base_ = static_cast<char*>(memory);
  if (bytes_ >= kHugePagesFrom) madvise(base_, bytes_, MADV_HUGEPAGE);
}

Mapping::~Mapping() {
  if (base_) munmap(base_, bytes_);
}

bool Mapping::contains(const void* address) const {
  const auto* at = static_cast<const char*>(address);
  return base_ <= at && at < base_ + bytes_;
}

void Mapping::allow(Access access) {
  const int protection = access == Access::none   ? PROT_NONE
                         : access == Access::read ? PROT_READ
                                                  : PROT_READ | PROT_WRITE;
  check(mprotect(base_, bytes_, protection) == 0, "mprotect", bytes_);
}

void Mapping::drop() { check(madvise(base_, bytes_, MADV_DONTNEED) == 0, "madvise", bytes_); }

void Mapping::take(Mapping& other) {
  void* const moved =
      mremap(other.base_, other.bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, base_);
  check(moved != MAP_FAILED, "mremap", bytes_);
  other.base_ = nullptr;
}

bool Mapping::touched() const {
  std::vector<unsigned char> pages(bytes_ / page());
  check(mincore(base_, bytes_, pages.data()) == 0, "mincore", bytes_);
  return std::any_of(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1) != 0; });
}

}  // namespace tessera::deferred
