#include "checkpoint/io/folder_lock.h"

#include <cerrno>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/error.h"

namespace tessera::store {
namespace {

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "an unknown host";
}

std::string holder(const FileDescriptor& file) {
  char text[512];
  const int64_t size = file.read_at(text, sizeof text, 0);
  std::string found(text, size > 0 ? static_cast<size_t>(size) : 0);
  while (!found.empty() && found.back() == '\n') found.pop_back();
  return found.empty() ? "another process" : found;
}

/// False if the file was removed meanwhile. Another process may then hold a lock on a new file of
/// the same name.
bool still_named(const FileDescriptor& file, const std::string& path) {
  struct stat mine {
  }, there{};
  return ::fstat(file.get(), &mine) == 0 && ::lstat(path.c_str(), &there) == 0 &&
         mine.st_ino == there.st_ino && mine.st_dev == there.st_dev;
}

/// The lock is written to, so it must not be another name of somebody's file.
void check_is_lock(const FileDescriptor& file, const std::string& path) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return;
  if (!S_ISREG(status.st_mode) || status.st_nlink > 1) {
    throw UsageError(fmt::format(
        "checkpoint: {} is {}; expected a lock that a run has made: remove it, or "
        "choose another folder",
        path, S_ISREG(status.st_mode) ? "a file with another name" : "no regular file"));
  }
}

}  // namespace

FolderLock::FolderLock(const std::string& folder) : path_(folder + "/.lock") {
  const std::string& path = path_;
  do {
    file_ = FileDescriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
    if (!file_ && errno == ELOOP) {
      throw UsageError(fmt::format(
          "checkpoint: {} is a symbolic link; expected a lock that a run has made: remove it, or "
          "choose another folder",
          path));
    }
    if (!file_)
      throw Error(
          fmt::format("checkpoint: {}: opening the lock failed: {}", path, errno_text(errno)));
    check_is_lock(file_, path);
    while (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK)
        throw Error(fmt::format("checkpoint: {}: locking failed: {}", path, errno_text(errno)));
      throw UsageError(
          fmt::format("checkpoint: the folder {} is being written by {}; two runs cannot share a "
                      "folder: stop that run or choose another folder",
                      folder, holder(file_)));
    }
  } while (!still_named(file_, path));
  const std::string text = fmt::format("pid {} on {}\n", ::getpid(), host_name());
  if (::ftruncate(file_.get(), 0) != 0 || !file_.write_at(text.data(), text.size(), 0)) {
    throw Error(
        fmt::format("checkpoint: {}: writing the lock failed: {}", path, errno_text(errno)));
  }
}

void FolderLock::check_held() const {
  if (still_named(file_, path_)) return;
  throw Error(
      fmt::format("checkpoint: {} was removed or replaced after this run had locked the folder, so "
                  "another run may write there; nothing was committed",
                  path_));
}

FolderLock::~FolderLock() {
  // Clears pid and host, so that the file does not name a process that no longer holds the lock.
  if (file_ && process_.is_this() && ::ftruncate(file_.get(), 0) != 0) return;
}

}  // namespace tessera::store
