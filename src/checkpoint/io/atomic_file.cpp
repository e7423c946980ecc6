#include "checkpoint/io/atomic_file.h"

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <random>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/error.h"

namespace tessera {
namespace {

// [Note: temporary files] A process that is killed leaves its temporary files, and the next one
// that writes in the folder removes them. A writer holds a lock on its file. Locks of other hosts
// may be invisible, so files of other hosts must also be unchanged for an hour.

/// The first part of the names of this host's temporary files. A host's name may begin with that of
/// another one and "-".
std::string own_prefix() { return ".tessera-" + own_host() + "@"; }

// Unique among processes and hosts that share the folder, and short for any length of the final
// name.
std::string temporary_name() {
  static std::atomic<unsigned> counter{0};
  std::random_device random;
  return own_prefix() + std::to_string(::getpid()) + "-" + std::to_string(counter++) + "-" +
         std::to_string(random()) + ".tmp";
}

/// Removes the temporary files of writers that have ended. `own`: the status of a new file, whose
/// time is that of the file system.
void remove_abandoned(const std::string& folder, const struct stat& own) {
  for (const auto& name : list_folder(folder).value_or(std::vector<std::string>())) {
    const std::string path = folder + "/" + name;
    if (!name.starts_with(".tessera-") || !name.ends_with(".tmp")) continue;
    const FileDescriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    struct stat status {};
    const bool locked = ::flock(file.get(), LOCK_EX | LOCK_NB) == 0;
    if ((!locked && errno == EWOULDBLOCK) || ::fstat(file.get(), &status) != 0) continue;
    if (status.st_ino == own.st_ino) continue;  // it has no lock where the system refused one
    if ((locked && name.starts_with(own_prefix())) || own.st_mtime - status.st_mtime > 3600)
      ::unlink(path.c_str());
  }
}

std::string resolved(const std::string& path) {
  std::error_code error;
  const auto real = std::filesystem::canonical(path, error);
  return error ? path : real.string();
}

}  // namespace

AtomicFile::AtomicFile(std::string component, const std::string& path)
    : component_(std::move(component)), path_(path), target_(resolved(path)) {
  if (path.empty()) throw UsageError(component_ + ": the path to write to is empty");
  struct stat status {};
  if (::stat(target_.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
    throw UsageError(component_ + ": " + path_ + " exists and is not a regular file");
  // The temporary name is short, so without this check only the final rename would fail.
  if (::lstat(target_.c_str(), &status) != 0 && errno == ENAMETOOLONG) {
    throw UsageError(component_ + ": " + path_ + ": " + errno_text(ENAMETOOLONG) +
                     "; expected a name of at most 255 bytes");
  }
  folder_ = std::filesystem::path(target_).parent_path().string();
  folder_ = folder_.empty() ? "." : folder_;
  if (::stat(folder_.c_str(), &status) != 0 || !S_ISDIR(status.st_mode))
    throw UsageError(component_ + ": " + path_ + ": the folder " + folder_ + " does not exist");
  while (!file_) {
    temporary_ = folder_ + "/" + temporary_name();
    file_ = FileDescriptor(uninterrupted(
        [&] { return ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666); }));
    if (!file_ && errno != EEXIST) {
      const int error = errno;
      temporary_.clear();
      throw Error(component_ + ": " + path_ + ": cannot create a file in " + folder_ + ": " +
                  errno_text(error));
    }
    if (!file_) continue;
    const auto lock = [&] { return ::flock(file_.get(), LOCK_EX | LOCK_NB); };
    const bool locked = uninterrupted(lock) == 0 || errno != EWOULDBLOCK;
    // Another process may have mistaken it for the file of a writer that has ended.
    if (!locked || (::fstat(file_.get(), &status) == 0 && status.st_nlink == 0)) discard();
  }
  // The ranks write a checkpoint in one new folder, which is removed as a whole.
  if (folder_.find(".partial-") == folder_.npos) remove_abandoned(folder_, status);
}

AtomicFile::~AtomicFile() {
  if (process_.is_this()) discard();
}

void AtomicFile::discard() noexcept {
  file_.close();
  if (!temporary_.empty()) {
    uninterrupted([&] { return ::unlink(temporary_.c_str()); });
    temporary_.clear();
  }
}

void AtomicFile::fail(const std::string& action) {
  const int error = errno;
  discard();
  throw Error(component_ + ": " + path_ + ": " + action + " failed: " + errno_text(error));
}

void AtomicFile::write_at(const void* from, size_t count, uint64_t offset) {
  if (!file_.write_at(from, count, offset))
    fail("writing " + std::to_string(count) + " bytes at offset " + std::to_string(offset));
}

/// Syncs and closes the temporary file first, because some file systems report failed writes then.
void AtomicFile::rename_to(const std::string& name) {
  if (uninterrupted([&] { return ::fsync(file_.get()); }) != 0) fail("syncing to disk");
  const FileDescriptor held(::fcntl(file_.get(), F_DUPFD_CLOEXEC, 0));  // keeps the lock
  if (!file_.close()) fail("closing");
  if (uninterrupted([&] { return ::rename(temporary_.c_str(), name.c_str()); }) != 0)
    fail("renaming the finished file into place");
}

void AtomicFile::commit() {
  rename_to(target_);
  temporary_.clear();
  if (!sync_folder(folder_))
    fail("the file is written, but a loss of power may undo it: syncing " + folder_);
}

void AtomicFile::rehearse() {
  const std::string block(4096, '\0');
  write_at(block.data(), block.size(), 0);
  const std::string other = folder_ + "/" + temporary_name();
  rename_to(other);
  temporary_ = other;
  if (!sync_folder(folder_)) fail("syncing the folder " + folder_);
  discard();
}

}  // namespace tessera
