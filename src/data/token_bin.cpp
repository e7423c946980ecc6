#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "tessera/data.h"
#include "tessera/error.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little, "llm.c's token files are little-endian and used in place");

constexpr int64_t kHeaderBytes = 256 * sizeof(int32_t);
constexpr int32_t kMagic = 20240520;
constexpr int32_t kVersion = 1;

[[noreturn]] void refuse_tokens(const std::string& path, const std::string& reason) {
  throw UsageError("TokenBin: " + path + ": " + reason);
}

std::shared_ptr<const void> map_file(const std::string& path, int64_t& size) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    refuse_tokens(path, "cannot be opened: " + std::generic_category().message(errno));
  }
  struct stat status {};
  const bool regular = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  size = regular ? static_cast<int64_t>(status.st_size) : 0;
  void* data = MAP_FAILED;
  int error = 0;
  if (size >= kHeaderBytes) {
    data = ::mmap(nullptr, static_cast<size_t>(size), PROT_READ, MAP_SHARED, fd, 0);
    error = errno;
  }
  ::close(fd);
  if (!regular) {
    refuse_tokens(path, "is not a regular file");
  }
  if (size < kHeaderBytes) {
    refuse_tokens(path,
                  "has " + std::to_string(size) + " bytes, fewer than the header's " + std::to_string(kHeaderBytes));
  }
  if (data == MAP_FAILED) {
    refuse_tokens(path, "cannot be mapped: " + std::generic_category().message(error));
  }
  const auto bytes = static_cast<size_t>(size);
  return std::shared_ptr<const void>(data, [bytes](const void* p) { ::munmap(const_cast<void*>(p), bytes); });
}

Tokens open_tokens(const std::string& path, int64_t vocab_size) {
  int64_t size = 0;
  const std::shared_ptr<const void> file = map_file(path, size);
  int32_t header[3];
  std::memcpy(header, file.get(), sizeof header);
  if (header[0] != kMagic) {
    refuse_tokens(path,
                  "begins with " + std::to_string(header[0]) + ", expected the magic number " + std::to_string(kMagic));
  }
  if (header[1] != kVersion) {
    refuse_tokens(path, "version " + std::to_string(header[1]) + ", expected " + std::to_string(kVersion));
  }
  const int64_t count = header[2];
  if (count < 0 || kHeaderBytes + 2 * count != size) {
    refuse_tokens(path, "the header says " + std::to_string(count) + " tokens, which makes " +
                            std::to_string(kHeaderBytes + 2 * count) + " bytes; the file has " + std::to_string(size));
  }
  Tokens tokens(file, static_cast<const char*>(file.get()) + kHeaderBytes, count, 2, "TokenBin: " + path);
  if (vocab_size > 0) {
    tokens.require_below(vocab_size);
  }
  return tokens;
}

}  // namespace

TokenData TokenBin::load() const {
  TokenData data;
  data.train = open_tokens(path, vocab_size);
  if (!val_path.empty()) {
    data.val = open_tokens(val_path, vocab_size);
  }
  return data;
}

}  // namespace tessera
