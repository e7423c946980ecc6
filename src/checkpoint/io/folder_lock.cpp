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
  return ::fstat(file.get(), &mine) == 0 && ::stat(path.c_str(), &there) == 0 &&
         mine.st_ino == there.st_ino && mine.st_dev == there.st_dev;
}

}  // namespace

FolderLock::FolderLock(const std::string& folder) {
  const std::string path = folder + "/.lock";
  do {
    file_ = FileDescriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    if (!file_)
      throw Error(
          fmt::format("checkpoint: {}: opening the lock failed: {}", path, errno_text(errno)));
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

FolderLock::~FolderLock() {
  // Clears pid and host, so that the file does not name a process that no longer holds the lock.
  if (file_ && ::ftruncate(file_.get(), 0) != 0) return;
}

}  // namespace tessera::store
