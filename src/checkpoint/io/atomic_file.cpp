#include "checkpoint/io/atomic_file.h"

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <random>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/error.h"

namespace tessera {
namespace {

// Unique among processes and hosts that share the folder, and short for any length of the final
// name.
std::string temporary_name() {
  static std::atomic<unsigned> counter{0};
  std::random_device random;
  return ".tessera-" + std::to_string(::getpid()) + "-" + std::to_string(counter++) + "-" +
         std::to_string(random()) + ".tmp";
}

std::string resolved(const std::string& path) {
  char* real = ::realpath(path.c_str(), nullptr);
  if (real == nullptr) {
    return path;
  }
  const std::string text = real;
  std::free(real);
  return text;
}

}  // namespace

AtomicFile::AtomicFile(std::string component, const std::string& path)
    : component_(std::move(component)), path_(path), target_(resolved(path)) {
  if (path.empty()) {
    throw UsageError(component_ + ": the path to write to is empty");
  }
  struct stat status {};
  if (::stat(target_.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw UsageError(component_ + ": " + path_ + " exists and is not a regular file");
  }
  // The temporary name is short, so without this check only the final rename would fail.
  if (::lstat(target_.c_str(), &status) != 0 && errno == ENAMETOOLONG) {
    throw UsageError(component_ + ": " + path_ + ": " + errno_text(ENAMETOOLONG) +
                     "; expected a name of at most 255 bytes");
  }
  folder_ = std::filesystem::path(target_).parent_path().string();
  folder_ = folder_.empty() ? "." : folder_;
  if (::stat(folder_.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) {
    throw UsageError(component_ + ": " + path_ + ": the folder " + folder_ + " does not exist");
  }
  int fd = -1;
  do {
    temporary_ = folder_ + "/" + temporary_name();
    fd = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (fd < 0 && (errno == EEXIST || errno == EINTR));
  if (fd < 0) {
    const int error = errno;
    temporary_.clear();
    throw Error(component_ + ": " + path_ + ": cannot create a file in " + folder_ + ": " +
                errno_text(error));
  }
  file_ = FileDescriptor(fd);
}

AtomicFile::~AtomicFile() {
  if (process_.is_this()) discard();
}

void AtomicFile::discard() noexcept {
  file_.close();
  if (!temporary_.empty()) {
    ::unlink(temporary_.c_str());
    temporary_.clear();
  }
}

void AtomicFile::fail(const std::string& action) {
  const int error = errno;
  discard();
  throw Error(component_ + ": " + path_ + ": " + action + " failed: " + errno_text(error));
}

void AtomicFile::write_at(const void* from, size_t count, uint64_t offset) {
  if (!file_.write_at(from, count, offset)) {
    fail("writing " + std::to_string(count) + " bytes at offset " + std::to_string(offset));
  }
}

/// Syncs and closes the temporary file first.
void AtomicFile::rename_to(const std::string& name) {
  if (::fsync(file_.get()) != 0) {
    fail("syncing to disk");
  }
  if (!file_.close()) {
    fail("closing");
  }
  if (::rename(temporary_.c_str(), name.c_str()) != 0) {
    fail("renaming the finished file into place");
  }
}

void AtomicFile::sync_folder() {
  const FileDescriptor folder(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems cannot sync a folder and return EINVAL. Nothing more can be done on those.
  if (!folder || (::fsync(folder.get()) != 0 && errno != EINVAL)) {
    fail("syncing the folder " + folder_);
  }
}

void AtomicFile::commit() {
  rename_to(target_);
  temporary_.clear();
  sync_folder();
}

void AtomicFile::rehearse() {
  const std::string block(4096, '\0');
  write_at(block.data(), block.size(), 0);
  const std::string other = folder_ + "/" + temporary_name();
  rename_to(other);
  temporary_ = other;
  sync_folder();
  discard();
}

}  // namespace tessera
