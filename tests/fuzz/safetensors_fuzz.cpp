// The input is a whole file: 8 bytes of header size, header, data. Any input is either refused with
// UsageError, or its tensors cover the data exactly and writing the header again gives the same
// header.

#include <cstdlib>
#include <cstring>
#include <string_view>

#include "checkpoint/io/safetensors_header.h"
#include "tessera/error.h"

namespace st = tessera::safetensors;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check(const st::Header& header, uint64_t data_bytes) {
  uint64_t covered = 0;
  for (const tessera::SafetensorsEntry& entry : header.entries) {
    require(entry.begin == covered && entry.begin <= entry.end);
    const auto bits =
        static_cast<uint64_t>(entry.numel()) * static_cast<uint64_t>(st::dtype_bits(entry.dtype));
    require(bits % 8 == 0 && bits / 8 == entry.end - entry.begin);
    covered = entry.end;
  }
  require(covered == data_bytes);
  const std::string again = st::format_header("again", header);
  const st::Header reparsed =
      st::parse_header("again", std::string_view(again).substr(st::kSizeBytes), data_bytes);
  require(reparsed.entries.size() == header.entries.size() && reparsed.metadata == header.metadata);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < st::kSizeBytes) return 0;
  unsigned char prefix[st::kSizeBytes];
  std::memcpy(prefix, data, sizeof prefix);
  try {
    const uint64_t header_bytes = st::header_size("input", prefix, size);
    const uint64_t data_bytes = size - sizeof prefix - header_bytes;
    const std::string_view text(reinterpret_cast<const char*>(data) + sizeof prefix, header_bytes);
    check(st::parse_header("input", text, data_bytes), data_bytes);
  } catch (const tessera::UsageError&) {
  }
  return 0;
}
