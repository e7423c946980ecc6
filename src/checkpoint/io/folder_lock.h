#pragma once

#include <string>

#include "checkpoint/io/file_descriptor.h"

namespace tessera::store {

/// An exclusive lock (flock) on `<folder>/.lock`, held while alive. The kernel lets go of it when
/// the process ends, however it ends; the file stays.
class FolderLock {
 public:
  FolderLock() = default;
  /// Does not wait: throws UsageError naming pid and host of the holder, Error when the system
  /// refuses.
  explicit FolderLock(const std::string& folder);
  ~FolderLock();
  FolderLock(FolderLock&&) noexcept = default;
  FolderLock& operator=(FolderLock&&) noexcept = default;

 private:
  FileDescriptor file_;
};

}  // namespace tessera::store
