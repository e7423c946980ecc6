#include "comm/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace tessera::comm {
namespace {

// The first page of the file holds the nonce; data starts on the second.
constexpr size_t header_bytes = 4096;

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what);
}

[[noreturn]] void fail_errno(const std::string& what) {
  fail(what + ": " + std::strerror(errno));
}

std::string mebibytes(uint64_t bytes) {
  return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
}

struct File {
  int fd;
  ~File() {
    if (fd >= 0) close(fd);
  }
  int release() { return std::exchange(fd, -1); }
};

// Segments made by this process. Ranks that are threads of one process share one mapping, and thread checkers, which
// know memory by its address, see that they do.
struct Registry {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<SharedSegment>> by_nonce;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

uint64_t random_nonce() {
  uint64_t nonce = 0;
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) fail_errno("no random numbers");
  return nonce;
}

void check_room(uint64_t bytes, int copies) {
  // Beyond this limit fallocate does not only fail, it raises SIGXFSZ.
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur) {
    fail("the limit of file sizes (ulimit -f) is " + mebibytes(limit.rlim_cur) + ", shared memory of " +
         mebibytes(bytes) + " needs more");
  }
  const auto available = static_cast<uint64_t>(available_memory());
  const auto factor = static_cast<uint64_t>(copies);
  if (bytes > available / factor) {
    fail("not enough memory: " + std::to_string(copies) + " x " + mebibytes(bytes) + " of shared memory wanted, " +
         mebibytes(available) + " available");
  }
}

}  // namespace

std::shared_ptr<SharedSegment> SharedSegment::create(size_t bytes, int copies) {
  if (bytes > (uint64_t{1} << 60)) fail("shared memory of " + mebibytes(bytes) + " is more than any machine has");
  const size_t total = header_bytes + bytes;
  check_room(total, copies);
  File file{memfd_create("tessera", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (file.fd < 0) fail_errno("memfd_create");
  int failed = 0;
  do {
    failed = fallocate(file.fd, 0, 0, static_cast<off_t>(total));
  } while (failed != 0 && errno == EINTR);
  if (failed != 0) fail_errno("cannot reserve " + mebibytes(total) + " of shared memory");
  // A file that cannot shrink cannot take pages away from under a peer.
  if (fcntl(file.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail_errno("cannot seal shared memory");

  std::shared_ptr<SharedSegment> segment(new SharedSegment);
  const ProcessIdentity self = this_process();
  segment->card_ = {self.pid, -1, self.start_time, random_nonce(), bytes};
  segment->map(file.fd, true);
  segment->card_.fd = file.release();
  std::memcpy(segment->base_, &segment->card_.nonce, sizeof segment->card_.nonce);
  std::lock_guard lock(registry().mutex);
  registry().by_nonce[segment->card_.nonce] = segment;
  return segment;
}

std::shared_ptr<SharedSegment> SharedSegment::open(const SegmentCard& card) {
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
  if (fstat(file.fd, &info) != 0 || static_cast<uint64_t>(info.st_size) != header_bytes + card.bytes) {
    fail(path + " is not the peer's memory (another pid namespace?)");
  }
  uint64_t nonce = 0;
  if (pread(file.fd, &nonce, sizeof nonce, 0) != sizeof nonce || nonce != card.nonce) {
    fail(path + " is not the peer's memory (another pid namespace?)");
  }
  std::shared_ptr<SharedSegment> segment(new SharedSegment);
  segment->card_ = card;
  segment->card_.fd = -1;
  segment->map(file.fd, false);  // of a peer's memory, what is used counts
  return segment;
}

void SharedSegment::map(int fd, bool now) {
  const size_t total = header_bytes + card_.bytes;
  void* base = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | (now ? MAP_POPULATE : 0), fd, 0);
  if (base == MAP_FAILED) fail_errno("cannot map " + mebibytes(total) + " of shared memory");
  base_ = static_cast<std::byte*>(base);
  mapped_ = total;
}

SharedSegment::~SharedSegment() {
  if (base_ == nullptr) return;
  const bool mine = card_.pid == getpid();
  if (mine) {
    std::lock_guard lock(registry().mutex);
    const auto found = registry().by_nonce.find(card_.nonce);
    if (found != registry().by_nonce.end() && found->second.expired()) registry().by_nonce.erase(found);
  }
  close_file();
  munmap(base_, mapped_);
}

std::byte* SharedSegment::data() const {
  return base_ + header_bytes;
}

void SharedSegment::close_file() {
  if (card_.fd < 0) return;
  close(card_.fd);
  card_.fd = -1;
}

}  // namespace tessera::comm
