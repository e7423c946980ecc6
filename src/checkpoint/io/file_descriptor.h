#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sys/stat.h>

namespace tessera {

/// Makes a system call, and repeats it while a signal interrupts it.
template <class Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

/// True if a call that failed with `errno` may succeed at another try; then waits first.
/// `attempts`: the remaining ones.
bool may_pass(int& attempts);

/// The same for a call that only reads. A network file system, and a process without free
/// descriptors or memory, may fail once, so that it is tried three times.
template <class Call>
auto persistent(const Call& call) {
  int attempts = 3;
  auto result = uninterrupted(call);
  while (result == -1 && may_pass(attempts)) result = uninterrupted(call);
  return result;
}

/// Owns a file descriptor. Reads and writes at offsets and repeats interrupted and short transfers.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() { close(); }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  /// Returns false with errno set on failure. The descriptor is closed in either case.
  bool close();

  /// Returns the number of bytes read: less than `count` only at the end of the file; -1 with errno
  /// set on failure.
  int64_t read_at(void* to, size_t count, uint64_t offset) const;
  /// Returns false with errno set on failure.
  bool write_at(const void* from, size_t count, uint64_t offset) const;

 private:
  int fd_ = -1;
};

/// None, with errno set, on failure.
FileDescriptor open_to_read(const std::string& path);

/// Opens a regular file and sets the number of its bytes. Throws UsageError that begins with
/// `where`.
FileDescriptor open_regular(const std::string& where, const std::string& path, uint64_t& bytes);

/// nullopt if `path` does not exist. Throws Error that begins with `component` if the system gives
/// no answer.
std::optional<struct stat> look_at(const std::string& component, const std::string& path);

/// The names in a folder; nullopt, with errno set, on failure.
std::optional<std::vector<std::string>> list_folder(const std::string& folder);

/// Returns false with errno set on failure. "" is the current folder.
bool sync_folder(const std::string& folder);

/// The name of this host.
std::string own_host();

/// The system's text for an errno, for example "No space left on device".
std::string errno_text(int error);

}  // namespace tessera
