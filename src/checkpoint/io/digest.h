#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "checkpoint/io/file_descriptor.h"

namespace tessera::store {

/// XXH3 with 128 bits, as 32 hexadecimal digits. It detects accidental damage and does not protect
/// against forgery.
inline constexpr const char* kDigestAlgorithm = "xxh3-128";
inline constexpr size_t kDigestLength = 32;

std::string digest_of(const void* data, size_t bytes);
inline std::string digest_of(const std::string& text) {
  return digest_of(text.data(), text.size());
}

/// Digest of `bytes` bytes of a file from `offset` on, read in small parts. Throws Error with the
/// system's reason if reading fails, UsageError if the file ends too early. The texts do not name
/// the file.
std::string digest_of(const FileDescriptor& file, uint64_t offset, uint64_t bytes);

}  // namespace tessera::store
