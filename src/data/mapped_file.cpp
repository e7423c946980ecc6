#include "data/mapped_file.h"

#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/error.h"

namespace tessera {

MappedFile map_file(const std::string& component, const std::string& path) {
  const auto refuse = [&](const std::string& reason) {
    throw UsageError(component + ": " + path + ": " + reason);
  };
  // Without O_NONBLOCK, opening a FIFO would block.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    refuse("cannot be opened: " + std::generic_category().message(errno));
  }
  struct stat status {};
  const bool regular = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  const auto bytes = regular ? static_cast<size_t>(status.st_size) : 0;
  void* data = bytes > 0 ? ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0) : nullptr;
  const int error = errno;
  ::close(fd);
  if (!regular) {
    refuse("is not a regular file");
  }
  if (data == MAP_FAILED) {
    refuse("cannot be mapped: " + std::generic_category().message(error));
  }
  if (bytes == 0) {
    return {};
  }
  return {std::shared_ptr<const uint8_t>(
              static_cast<const uint8_t*>(data),
              [bytes](const uint8_t* p) { ::munmap(const_cast<uint8_t*>(p), bytes); }),
          static_cast<int64_t>(bytes)};
}

}  // namespace tessera
