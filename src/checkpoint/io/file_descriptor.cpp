#include "checkpoint/io/file_descriptor.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "tessera/detail/folders.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// One system call transfers at most 2 GiB minus one page.
constexpr size_t kMaxTransfer = size_t{1} << 30;

}  // namespace

bool may_pass(int& attempts) {
  static constexpr int kPassing[] = {EIO, ESTALE, EMFILE, ENFILE, ENOMEM, ETIMEDOUT};
  if (--attempts == 0 || std::count(std::begin(kPassing), std::end(kPassing), errno) == 0)
    return false;
  ::usleep(attempts > 1 ? 10'000 : 500'000);
  return true;
}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

bool FileDescriptor::close() {
  const int fd = std::exchange(fd_, -1);
  return fd < 0 || ::close(fd) == 0 || errno == EINTR;  // it is closed then, too
}

int64_t FileDescriptor::read_at(void* to, size_t count, uint64_t offset) const {
  size_t done = 0;
  while (done < count) {
    const ssize_t got = persistent([&] {
      return ::pread(fd_, static_cast<char*>(to) + done, std::min(count - done, kMaxTransfer),
                     static_cast<off_t>(offset + done));
    });
    if (got < 0) return -1;
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return static_cast<int64_t>(done);
}

bool FileDescriptor::write_at(const void* from, size_t count, uint64_t offset) const {
  size_t done = 0;
  while (done < count) {
    const ssize_t put = uninterrupted([&] {
      return ::pwrite(fd_, static_cast<const char*>(from) + done,
                      std::min(count - done, kMaxTransfer), static_cast<off_t>(offset + done));
    });
    if (put <= 0) {
      errno = put == 0 ? EIO : errno;
      return false;
    }
    done += static_cast<size_t>(put);
  }
  return true;
}

FileDescriptor open_to_read(const std::string& path) {
  return FileDescriptor(
      persistent([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); }));
}

FileDescriptor open_regular(const std::string& where, const std::string& path, uint64_t& bytes) {
  FileDescriptor file = open_to_read(path);
  struct stat status {};
  if (!file || persistent([&] { return ::fstat(file.get(), &status); }) != 0)
    throw UsageError(where + "cannot be opened: " + errno_text(errno));
  if (!S_ISREG(status.st_mode)) throw UsageError(where + "is not a regular file");
  bytes = static_cast<uint64_t>(status.st_size);
  return file;
}

std::optional<struct stat> look_at(const std::string& component, const std::string& path) {
  struct stat status {};
  if (persistent([&] { return ::stat(path.c_str(), &status); }) == 0) return status;
  if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
  throw Error(component + ": " + path + ": cannot be read: " + errno_text(errno));
}

std::optional<std::vector<std::string>> list_folder(const std::string& folder) {
  std::vector<std::string> names;
  const auto list = [&] {
    std::error_code error;
    names = detail::names_in(folder, error);
    errno = error.value();
    return error ? -1 : 0;
  };
  if (persistent(list) != 0) return std::nullopt;
  return names;
}

bool sync_folder(const std::string& folder) {
  const FileDescriptor file = open_to_read(folder.empty() ? "." : folder);
  // Some file systems cannot sync a folder and return EINVAL. Nothing more can be done on those.
  return file && (uninterrupted([&] { return ::fsync(file.get()); }) == 0 || errno == EINVAL);
}

std::string own_host() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string errno_text(int error) { return std::generic_category().message(error); }

}  // namespace tessera
