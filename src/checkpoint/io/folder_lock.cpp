#include "checkpoint/io/folder_lock.h"

#include <cerrno>

#include <fcntl.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/error.h"

namespace tessera::store {
namespace {

/// The text of the file about its holder; "?" if it cannot be read.
std::string text_of(const FileDescriptor& file) {
  char text[512];
  const int64_t size = file.read_at(text, sizeof text, 0);
  return size < 0 ? "?" : std::string(text, static_cast<size_t>(size));
}

bool clear(const FileDescriptor& file) {
  return uninterrupted([&] { return ::ftruncate(file.get(), 0); }) == 0;
}

std::string holder(const FileDescriptor& file) {
  const std::string found = text_of(file);
  return found.empty() ? "another process" : found.substr(0, found.find('\n'));
}

/// False if the file was removed meanwhile. Another process may then hold a lock on a new file of
/// the same name.
bool still_named(const FileDescriptor& file, const std::string& path) {
  struct stat mine {
  }, there{};
  if (::lstat(path.c_str(), &there) != 0) return errno != ENOENT;
  return ::fstat(file.get(), &mine) != 0 ||
         (mine.st_ino == there.st_ino && mine.st_dev == there.st_dev);
}

/// The lock file is written, so it must not be a link to another file.
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
  bool locked = false;
  do {
    file_ = FileDescriptor(uninterrupted(
        [&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666); }));
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
    const auto lock = [&] { return ::flock(file_.get(), LOCK_EX | LOCK_NB); };
    locked = uninterrupted(lock) == 0;
    if (locked) continue;
    if (errno == EWOULDBLOCK) {
      throw UsageError(
          fmt::format("checkpoint: the folder {} is being written by {}; two runs cannot share a "
                      "folder: stop that run or choose another folder",
                      folder, holder(file_)));
    }
    // Lustre without the option flock and NFS without its lock service give this error.
    if (errno != ENOSYS && errno != ENOLCK && errno != EOPNOTSUPP)
      throw Error(fmt::format("checkpoint: {}: locking failed: {}", path, errno_text(errno)));
    spdlog::warn(
        "tessera: checkpoint: {}: the file system has no locks ({}); expected that no other run "
        "writes in this folder",
        path, errno_text(errno));
  } while (!still_named(file_, path));
  const std::string before = text_of(file_), host = " on " + own_host() + "\n";
  alone_ = locked && (before.empty() || before.ends_with(host));
  text_ = "pid " + std::to_string(::getpid()) + host;
  if (!clear(file_) || !file_.write_at(text_.data(), text_.size(), 0)) {
    throw Error(
        fmt::format("checkpoint: {}: writing the lock failed: {}", path, errno_text(errno)));
  }
}

void FolderLock::check_held() const {
  const std::string now = text_of(file_);
  if (still_named(file_, path_) && (now == text_ || now == "?")) return;
  throw Error(
      fmt::format("checkpoint: {} was removed or changed after this run had locked the folder, so "
                  "another run may write there; nothing was committed",
                  path_));
}

FolderLock::~FolderLock() {
  // Clears pid and host, so that the file does not name a process that no longer holds the lock.
  if (file_ && process_.is_this() && text_of(file_) == text_ && !clear(file_)) return;
}

}  // namespace tessera::store
