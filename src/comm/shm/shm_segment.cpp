#include "comm/shm/shm_segment.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

namespace tessera::comm {
namespace {

// The nonce is at the start of the file. Data comes after it, within a page if pages are larger.
constexpr size_t header_bytes = 4096;

#ifndef MADV_COLLAPSE
constexpr int MADV_COLLAPSE = 25;  // glibc 2.36 does not define it
#endif

[[noreturn]] void fail(const std::string& message) { throw std::runtime_error(message); }

[[noreturn]] void fail_errno(const std::string& message) {
  fail(message + ": " + std::strerror(errno));
}

std::string mebibytes(uint64_t bytes) {
  return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
}

/// [Note: huge pages] A page of a peer's memory that a rank reads also counts as memory of that
/// rank (in its RSS) until it is unmapped, and unmapping is cheap only for huge pages. By default
/// the system uses no huge pages for shared memory, but it makes them on request (MADV_COLLAPSE,
/// Linux 6.1).
constexpr uint64_t huge_bytes = ShmSegment::huge_bytes;
// For smaller segments the time at start-up is not worth it.
constexpr uint64_t min_collapsed = 4 << 20;
// If memory is fragmented, the system must first move pages, and the peers wait meanwhile.
constexpr auto max_collapse_time = std::chrono::seconds(1);

/// Makes the pages of [from, from + bytes) of a file present. False: errno has the reason.
bool allocate(int fd, uint64_t from, uint64_t bytes) {
  while (fallocate(fd, 0, static_cast<off_t>(from), static_cast<off_t>(bytes)) != 0)
    if (errno != EINTR) return false;
  return true;
}

/// Puts [base, base + bytes) of a new file that is mapped from its start into huge pages, as far as
/// the system has them. Returns the number of leading bytes that are in huge pages. Each is made
/// from one small page: small pages for all of it would take ten times the time, for the copy.
uint64_t collapse(int fd, std::byte* base, uint64_t bytes) {
  if (bytes < min_collapsed || sysconf(_SC_PAGESIZE) != 4096)
    return 0;  // huge_bytes is right for pages of 4 KiB only
  const auto begin = std::chrono::steady_clock::now();
  uint64_t done = 0;
  while (done + huge_bytes <= bytes &&
         std::chrono::steady_clock::now() - begin < max_collapse_time && allocate(fd, done, 1) &&
         madvise(base + done, huge_bytes, MADV_COLLAPSE) == 0)
    done += huge_bytes;
  return done;
}

struct File {
  int fd;
  ~File() {
    if (fd >= 0) close(fd);
  }
  int release() { return std::exchange(fd, -1); }
};

// Segments made by this process. Ranks that are threads of one process share one mapping, so that
// thread checkers, which identify memory by its address, see accesses to the same memory.
struct Registry {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<ShmSegment>> by_nonce;
};

Registry& registry() {
  static auto* const instance = new Registry;  // never destroyed: tensors may outlive it
  return *instance;
}

uint64_t random_nonce() {
  uint64_t nonce = 0;
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) fail_errno("getrandom");
  return nonce;
}

void check_memory(uint64_t bytes, int copies) {
  // Beyond this limit fallocate fails and also raises SIGXFSZ, which ends the process.
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      bytes > limit.rlim_cur) {
    fail("the limit of file sizes (ulimit -f) is " + mebibytes(limit.rlim_cur) +
         ", but shared memory needs " + mebibytes(bytes));
  }
  const auto available = static_cast<uint64_t>(available_memory());
  const auto factor = static_cast<uint64_t>(copies);
  if (bytes > available / factor) {
    fail("not enough memory: " + std::to_string(copies) + " x " + mebibytes(bytes) +
         " of shared memory needed, " + mebibytes(available) + " available");
  }
}

}  // namespace

std::shared_ptr<ShmSegment> ShmSegment::create(size_t bytes, int copies) {
  if (bytes > (uint64_t{1} << 60))
    fail("shared memory of " + mebibytes(bytes) + " is more than any machine has");
  const size_t total = header_bytes + bytes;
  check_memory(total, copies);
  File file{memfd_create("tessera", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (file.fd < 0) fail_errno("memfd_create");
  if (ftruncate(file.fd, static_cast<off_t>(total)) != 0)
    fail_errno("cannot reserve " + mebibytes(total) + " of shared memory");
  // A peer that accessed pages beyond the end of a shrunk file would get SIGBUS.
  if (fcntl(file.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    fail_errno("cannot seal shared memory");

  std::shared_ptr<ShmSegment> segment(new ShmSegment);
  const ProcessIdentity self = this_process();
  segment->card_ = {self.pid, -1, self.start_time, random_nonce(), bytes};
  segment->own_ = true;
  segment->map(file.fd);
  segment->card_.huge = collapse(file.fd, segment->base_, total);
  if (!allocate(file.fd, 0, total))
    fail_errno("cannot reserve " + mebibytes(total) + " of shared memory");
  segment->map_at(segment->base_, file.fd, MAP_POPULATE);
  segment->card_.fd = file.release();
  std::memcpy(segment->base_, &segment->card_.nonce, sizeof segment->card_.nonce);
  std::lock_guard lock(registry().mutex);
  registry().by_nonce[segment->card_.nonce] = segment;
  return segment;
}

std::shared_ptr<ShmSegment> ShmSegment::open(const SegmentCard& card) {
  if (card.pid == getpid()) {
    std::lock_guard lock(registry().mutex);
    const auto found = registry().by_nonce.find(card.nonce);
    if (found != registry().by_nonce.end()) {
      if (auto segment = found->second.lock()) return segment;
    }
  }
  const std::string path = "/proc/" + std::to_string(card.pid) + "/fd/" + std::to_string(card.fd);
  File file{::open(path.c_str(), O_RDWR | O_CLOEXEC)};
  if (file.fd < 0) fail_errno("cannot open " + path);
  struct stat info {};
  if (fstat(file.fd, &info) != 0 ||
      static_cast<uint64_t>(info.st_size) != header_bytes + card.bytes)
    fail(path + " is not the peer's memory (another pid namespace?)");
  uint64_t nonce = 0;
  if (pread(file.fd, &nonce, sizeof nonce, 0) != sizeof nonce || nonce != card.nonce)
    fail(path + " is not the peer's memory (another pid namespace?)");
  std::shared_ptr<ShmSegment> segment(new ShmSegment);
  segment->card_ = card;
  segment->card_.fd = -1;
  segment->map(file.fd);  // only the used pages of a peer's memory are to count here
  return segment;
}

void ShmSegment::map(int fd) {
  const size_t total = header_bytes + card_.bytes;
  // Huge pages can only be mapped at addresses that are multiples of their size.
  const size_t slack = total < huge_bytes ? 0 : huge_bytes;
  void* reserved =
      mmap(nullptr, total + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) fail_errno("cannot map " + mebibytes(total) + " of shared memory");
  reserved_ = reserved;
  reserved_bytes_ = total + slack;
  auto* start = static_cast<std::byte*>(reserved);
  if (slack > 0) start += -reinterpret_cast<uintptr_t>(reserved) & (huge_bytes - 1);
  map_at(start, fd, 0);
}

void ShmSegment::map_at(std::byte* base, int fd, int flags) {
  const size_t total = header_bytes + card_.bytes;
  if (mmap(base, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | flags, fd, 0) ==
      MAP_FAILED)
    fail_errno("cannot map " + mebibytes(total) + " of shared memory");
  base_ = base;
}

void ShmSegment::forget(const std::byte* from, size_t bytes) const {
  if (!forgets()) return;
  const auto offset = static_cast<uint64_t>(from - base_);
  const uint64_t begin = offset / huge_bytes * huge_bytes;
  const uint64_t end =
      std::min<uint64_t>((offset + bytes + huge_bytes - 1) / huge_bytes * huge_bytes, card_.huge);
  if (begin < end) madvise(base_ + begin, end - begin, MADV_DONTNEED);
}

ShmSegment::~ShmSegment() {
  if (reserved_ == nullptr) return;
  if (own_) {
    std::lock_guard lock(registry().mutex);
    const auto found = registry().by_nonce.find(card_.nonce);
    if (found != registry().by_nonce.end() && found->second.expired())
      registry().by_nonce.erase(found);
  }
  close_file();
  munmap(reserved_, reserved_bytes_);
}

std::byte* ShmSegment::data() const { return base_ + header_bytes; }

void ShmSegment::close_file() {
  if (card_.fd < 0) return;
  close(card_.fd);
  card_.fd = -1;
}

}  // namespace tessera::comm
