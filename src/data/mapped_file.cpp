#include "data/mapped_file.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>
#include <optional>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/error.h"

namespace tessera {
namespace {

struct FileIdentity {
  dev_t device = 0;
  ino_t inode = 0;
  bool operator==(const FileIdentity&) const = default;
};

/// One mapped file. The signal handler reads the atomic members. A node stays in the list and is
/// used again after its file was unmapped.
struct Mapping {
  std::atomic<uintptr_t> begin{0};  // 0: free
  std::atomic<size_t> bytes{0};
  std::atomic<int64_t> lost_at{-1};  // offset of the last read of a lost page; -1: none
  std::atomic<Mapping*> next{nullptr};
  std::string component, path;  // this and the next are guarded by mappings_mutex
  FileIdentity identity;

  bool contains(uintptr_t address) const {
    const uintptr_t first = begin.load();
    return first != 0 && address >= first && address - first < bytes.load();
  }
};

std::mutex mappings_mutex;
std::atomic<Mapping*> mappings{nullptr};
std::atomic<int> lost_pages{0};
struct sigaction sigbus_before {};
uintptr_t page_bytes = 4096;
static_assert(std::atomic<uintptr_t>::is_always_lock_free, "used in a signal handler");

Mapping* mapping_of(uintptr_t address) {
  Mapping* mapping = mappings.load();
  while (mapping != nullptr && !mapping->contains(address)) mapping = mapping->next.load();
  return mapping;
}

void pass_on_sigbus(int signal, siginfo_t* info, void* context) {
  if ((sigbus_before.sa_flags & SA_SIGINFO) != 0)
    return sigbus_before.sa_sigaction(signal, info, context);
  if (sigbus_before.sa_handler != SIG_DFL && sigbus_before.sa_handler != SIG_IGN)
    return sigbus_before.sa_handler(signal);
  const bool sent = info->si_code <= 0;  // by kill() or raise(), not by a fault
  if (sent && sigbus_before.sa_handler == SIG_IGN) return;
  ::signal(signal, SIG_DFL);
  if (sent) ::raise(signal);  // a fault happens again when the handler returns
}

void on_sigbus(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  Mapping* const mapping = info->si_code > 0 ? mapping_of(address) : nullptr;
  if (mapping == nullptr) return pass_on_sigbus(signal, info, context);
  // Before the page becomes readable, so that no thread reads its zeros without the mark.
  mapping->lost_at.store(static_cast<int64_t>(address - mapping->begin.load()));
  lost_pages.fetch_add(1);
  void* const page = reinterpret_cast<void*>(address / page_bytes * page_bytes);
  if (::mmap(page, page_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
      MAP_FAILED)
    return pass_on_sigbus(signal, info, context);
  errno = error;
}

void install_sigbus_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    struct sigaction action {};
    action.sa_sigaction = on_sigbus;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigemptyset(&action.sa_mask);
    ::sigaction(SIGBUS, nullptr, &sigbus_before);
    ::sigaction(SIGBUS, &action, nullptr);
  });
}

Mapping* add_mapping(const void* data, const struct stat& status, const std::string& component,
                     const std::string& path) {
  const std::lock_guard lock(mappings_mutex);
  Mapping* mapping = mappings.load();
  while (mapping != nullptr && mapping->begin.load() != 0) mapping = mapping->next.load();
  if (mapping == nullptr) {
    mapping = new Mapping;
    mapping->next.store(mappings.load());
    mappings.store(mapping);
  }
  mapping->component = component;
  mapping->path = path;
  mapping->lost_at.store(-1);
  mapping->identity = {status.st_dev, status.st_ino};
  mapping->bytes.store(static_cast<size_t>(status.st_size));
  mapping->begin.store(reinterpret_cast<uintptr_t>(data));
  return mapping;
}

void remove_mapping(Mapping* mapping) {
  const std::lock_guard lock(mappings_mutex);
  void* const data = reinterpret_cast<void*>(mapping->begin.exchange(0));
  ::munmap(data, mapping->bytes.load());
}

/// The part of a mapping that check_mapped() needs, copied under the lock.
struct MappingCopy {
  std::string component, path;
  size_t bytes = 0;
  int64_t lost_at = -1;
  FileIdentity identity;
};

std::optional<MappingCopy> copy_of_mapping(const void* data) {
  if (mappings.load() == nullptr) return std::nullopt;
  const std::lock_guard lock(mappings_mutex);
  const Mapping* const mapping = mapping_of(reinterpret_cast<uintptr_t>(data));
  if (mapping == nullptr) return std::nullopt;
  return MappingCopy{mapping->component, mapping->path, mapping->bytes, mapping->lost_at,
                     mapping->identity};
}

}  // namespace

void check_mapped(const void* data) {
  const auto mapping = copy_of_mapping(data);
  if (!mapping) return;
  struct stat status {};
  // Another file may have the name now. The mapped one is then unchanged.
  const bool known = ::stat(mapping->path.c_str(), &status) == 0 &&
                     FileIdentity{status.st_dev, status.st_ino} == mapping->identity;
  const bool shorter = known && static_cast<size_t>(status.st_size) < mapping->bytes;
  if (mapping->lost_at < 0 && !shorter) return;
  const std::string size = std::to_string(mapping->bytes);
  throw Error(mapping->component + ": " + mapping->path +
              (shorter ? " was shortened from " + size + " to " + std::to_string(status.st_size) +
                             " bytes while it was in use"
                       : " of " + size + " bytes cannot be read any more at byte " +
                             std::to_string(mapping->lost_at) +
                             ": it was shortened while it was in use, or the disk failed"));
}

void check_mapped_pages(const void* data) {
  // The caller has read the data. The check for lost pages must not be moved before that read.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (lost_pages.load() > 0) check_mapped(data);
}

MappedFile map_file(const std::string& component, const std::string& path) {
  const auto refuse = [&](const std::string& reason) {
    throw UsageError(component + ": " + path + ": " + reason);
  };
  // Without O_NONBLOCK, opening a FIFO would block.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) refuse("cannot be opened: " + std::generic_category().message(errno));
  struct stat status {};
  const bool regular = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  const auto bytes = regular ? static_cast<size_t>(status.st_size) : 0;
  void* data = bytes > 0 ? ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0) : nullptr;
  const int error = errno;
  ::close(fd);
  if (!regular) refuse("is not a regular file");
  if (data == MAP_FAILED) refuse("cannot be mapped: " + std::generic_category().message(error));
  if (bytes == 0) return {};
  install_sigbus_handler();
  Mapping* const mapping = add_mapping(data, status, component, path);
  return {std::shared_ptr<const uint8_t>(static_cast<const uint8_t*>(data),
                                         [mapping](const uint8_t*) { remove_mapping(mapping); }),
          static_cast<int64_t>(bytes)};
}

}  // namespace tessera
