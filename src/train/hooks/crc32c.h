#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::train {

/// CRC-32C (Castagnoli, RFC 3720), as TFRecord files use it. Local.
uint32_t crc32c(std::string_view bytes);

/// The form that TFRecord stores: rotated by 15 bits, plus a constant, so that the checksum of data
/// that contains checksums is sound.
uint32_t masked_crc32c(std::string_view bytes);

}  // namespace tessera::train
