#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// A request to the store, or its reply. On the wire: the size of code and parts in 4 bytes and its
/// complement in 4 bytes, the code in 1 byte, each part as its size in 4 bytes and its bytes, then
/// a checksum of all this (seal()). Integers are big-endian.
struct StoreMessage {
  uint8_t code = 0;
  std::vector<std::string> parts;
};

/// The largest message that is sent or accepted, without its size: 64 MiB. All keys and values of
/// one call of the store count together.
constexpr size_t kMaxMessageBytes = size_t{64} << 20;

/// The bytes of a message. Throws UsageError if it is larger than kMaxMessageBytes.
std::string encode(const StoreMessage& message);

enum class Taken { incomplete, malformed, whole };

/// Removes one message from the front of `buffer`. The sizes in it may be anything.
Taken take_message(std::string& buffer, StoreMessage& message);

/// Appends a checksum of `bytes`. It finds damage on the way and proves nothing.
void seal(std::string& bytes);
/// True if these bytes end with their checksum.
bool is_sealed(std::string_view bytes);
constexpr size_t kSealBytes = 8;

void append_number(std::string& bytes, uint32_t number);
/// The 4 bytes at `at`, which must exist.
uint32_t number_at(std::string_view bytes, size_t at);

}  // namespace tessera::comm
