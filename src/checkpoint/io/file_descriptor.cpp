#include "checkpoint/io/file_descriptor.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace tessera {
namespace {

// One system call transfers at most 2 GiB minus one page.
constexpr size_t kMaxTransfer = size_t{1} << 30;

}  // namespace

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
  // A network file system may fail once, so a read is tried three times.
  int attempts = 3;
  size_t done = 0;
  while (done < count) {
    const ssize_t got = uninterrupted([&] {
      return ::pread(fd_, static_cast<char*>(to) + done, std::min(count - done, kMaxTransfer),
                     static_cast<off_t>(offset + done));
    });
    if (got < 0) {
      if (--attempts == 0) return -1;
      ::usleep(100'000);
      continue;
    }
    if (got == 0) {
      break;
    }
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
      uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); }));
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
