#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

/// Owns a file descriptor. Reads and writes at offsets, whole or not at all, over signals and short
/// transfers.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() { close(); }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  /// False, with errno set, when the system refuses. Closed afterwards in any case.
  bool close();

  /// The number of bytes read: less than `count` only at the end of the file, -1 with errno set on
  /// failure.
  int64_t read_at(void* to, size_t count, uint64_t offset) const;
  /// False, with errno set, on failure.
  bool write_at(const void* from, size_t count, uint64_t offset) const;

 private:
  int fd_ = -1;
};

/// The system's words for an errno, for example "No space left on device".
std::string errno_text(int error);

}  // namespace tessera
