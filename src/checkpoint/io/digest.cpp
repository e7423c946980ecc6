#include "checkpoint/io/digest.h"

#include <algorithm>
#include <cerrno>
#include <new>
#include <vector>

#include <xxhash.h>

#include "tessera/error.h"

namespace tessera::store {
namespace {

constexpr uint64_t kReadBytes = uint64_t{4} << 20;

std::string hex(const XXH128_hash_t& hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : canonical.digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace

std::string digest_of(const void* data, size_t bytes) { return hex(XXH3_128bits(data, bytes)); }

std::string digest_of(const FileDescriptor& file, uint64_t offset, uint64_t bytes) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       &XXH3_freeState);
  if (!state) throw std::bad_alloc();
  XXH3_128bits_reset(state.get());
  std::vector<char> buffer(std::min(bytes, kReadBytes));
  for (uint64_t done = 0; done < bytes;) {
    const size_t count = std::min(bytes - done, kReadBytes);
    const int64_t got = file.read_at(buffer.data(), count, offset + done);
    if (got < 0) {
      throw Error("reading " + std::to_string(count) + " bytes at offset " +
                  std::to_string(offset + done) + " failed: " + errno_text(errno));
    }
    if (static_cast<size_t>(got) != count) {
      throw UsageError("the file ends at byte " +
                       std::to_string(offset + done + static_cast<uint64_t>(got)));
    }
    XXH3_128bits_update(state.get(), buffer.data(), count);
    done += count;
  }
  return hex(XXH3_128bits_digest(state.get()));
}

}  // namespace tessera::store
