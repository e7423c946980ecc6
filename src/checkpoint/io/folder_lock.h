#pragma once

#include <string>

#include "checkpoint/io/file_descriptor.h"
#include "tessera/detail/own_process.h"

namespace tessera::store {

/// An exclusive lock (flock) on `<folder>/.lock`, held while this object is alive. The kernel
/// releases it when the process ends for any reason. The file stays. Some file systems have no
/// locks, which is logged; some do not show locks to other hosts. Each holder writes its name into
/// the file, so check_held() notices a second holder.
class FolderLock {
 public:
  FolderLock() = default;
  /// Does not wait. Throws UsageError with pid and host of the process that holds the lock, or if
  /// the file is a link, has other names or is no regular file; Error if the system reports a
  /// failure.
  explicit FolderLock(const std::string& folder);
  /// Throws Error if the file was removed, replaced or changed: another process may hold it.
  void check_held() const;
  /// True if it is certain that no other process writes in the folder: the lock is held, and the
  /// holder before was on this host or has ended in order.
  bool alone() const { return alone_; }
  ~FolderLock();
  FolderLock(FolderLock&&) noexcept = default;
  FolderLock& operator=(FolderLock&&) noexcept = default;

 private:
  std::string path_;
  std::string text_;  // of the file
  bool alone_ = false;
  FileDescriptor file_;
  detail::OwnProcess process_;
};

}  // namespace tessera::store
