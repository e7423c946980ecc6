#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

// Reads the central directory of a zip archive and checks it. Does not use libtorch, so that it can
// be fuzzed at full speed. The format: PKWARE's APPNOTE.TXT, sections 4.3.7, 4.3.12 to 4.3.16
// and 4.5.3.

namespace tessera::pickle {

inline constexpr uint64_t kMaxDirectoryBytes = 16 << 20;

struct ZipRecord {
  std::string name;
  uint64_t offset = 0;  // of the data, from the beginning of the file
  uint64_t bytes = 0;   // of the data, after decompression
  uint32_t crc = 0;     // of the data, after decompression
  bool compressed = false;
};

/// Reads exactly `count` bytes at `offset`; throws if it cannot.
using ReadAt = std::function<void(void* to, size_t count, uint64_t offset)>;

/// The records of the archive, in order of their offsets. Throws UsageError, which begins with
/// `where`, for anything but plain records (stored or deflated, not encrypted, on one disk) that
/// lie within the file before the directory, do not overlap, and have different names.
std::vector<ZipRecord> read_zip_directory(const std::string& where, uint64_t file_bytes,
                                          const ReadAt& read);

/// The checksum of zip archives: CRC-32 with the polynomial 0xedb88320. libtorch's reader does not
/// compare it.
uint32_t zip_crc(std::string_view data);

}  // namespace tessera::pickle
