#pragma once

#include <string>

#include "checkpoint/io/file_descriptor.h"
#include "tessera/detail/own_process.h"

namespace tessera::store {

/// An exclusive lock (flock) on `<folder>/.lock`, held while this object is alive. The kernel
/// releases it when the process ends for any reason. The file stays.
class FolderLock {
 public:
  FolderLock() = default;
  /// Does not wait. Throws UsageError with pid and host of the process that holds the lock, or if
  /// the file is a link, has other names or is no regular file; Error if the system reports a
  /// failure.
  explicit FolderLock(const std::string& folder);
  /// Throws Error if the file was removed or replaced: another process may hold a new one.
  void check_held() const;
  ~FolderLock();
  FolderLock(FolderLock&&) noexcept = default;
  FolderLock& operator=(FolderLock&&) noexcept = default;

 private:
  std::string path_;
  FileDescriptor file_;
  detail::OwnProcess process_;
};

}  // namespace tessera::store
