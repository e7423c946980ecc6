#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/detail/safetensors_entry.h"

// Parses and formats the header of a safetensors file. Does not use libtorch, so that it can be
// fuzzed at full speed.

namespace tessera::safetensors {

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr size_t kSizeBytes = 8;  // the little-endian header size before the header
inline constexpr const char* kMetadataKey = "__metadata__";
// [Note: complex128]
inline constexpr const char* kComplexKey = "complex128";
inline constexpr const char* kComplex128 = "C128";

struct Header {
  std::vector<SafetensorsEntry> entries;  // by begin, then end, then name
  std::map<std::string, std::string> metadata;
};

/// Bits of one element of a dtype of the format; 0 for an unknown name.
int dtype_bits(std::string_view dtype);

/// Checks the first 8 bytes of a file of `file_bytes` bytes and returns the header's size. Throws
/// UsageError with `file`.
uint64_t header_size(const std::string& file, const unsigned char (&prefix)[kSizeBytes],
                     uint64_t file_bytes);

/// Parses and checks a whole header. Its tensors must cover `data_bytes` exactly. Takes memory
/// proportional to the text. Throws UsageError with `file` and the tensor, if the error is in one.
Header parse_header(const std::string& file, std::string_view text, uint64_t data_bytes);

/// Returns the 8 bytes and the header, padded with spaces to a multiple of 8. Throws UsageError for
/// names or values that are not UTF-8 and for a header above the limit.
std::string format_header(const std::string& file, const Header& header);

bool is_utf8(std::string_view text);

/// A name for an error message: in quotes, with control characters escaped, shortened if long.
std::string in_quotes(std::string_view name);

}  // namespace tessera::safetensors
