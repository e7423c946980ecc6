#include "comm/store/message.h"

#include <fmt/format.h>
#include <xxhash.h>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

constexpr size_t kNumberBytes = 4, kFrontBytes = 2 * kNumberBytes;

std::optional<StoreMessage> decode(std::string_view body) {
  StoreMessage message;
  if (body.empty()) return std::nullopt;
  message.code = static_cast<uint8_t>(body[0]);
  body.remove_prefix(1);
  while (!body.empty()) {
    if (body.size() < kNumberBytes) return std::nullopt;
    const size_t size = number_at(body, 0);
    body.remove_prefix(kNumberBytes);
    if (size > body.size()) return std::nullopt;
    message.parts.emplace_back(body.substr(0, size));
    body.remove_prefix(size);
  }
  return message;
}

}  // namespace

void append_number(std::string& bytes, uint32_t number) {
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(number >> shift);
}

uint32_t number_at(std::string_view bytes, size_t at) {
  uint32_t number = 0;
  for (size_t i = 0; i < kNumberBytes; ++i)
    number = number << 8 | static_cast<uint8_t>(bytes[at + i]);
  return number;
}

void seal(std::string& bytes) {
  const uint64_t sum = XXH3_64bits(bytes.data(), bytes.size());
  append_number(bytes, static_cast<uint32_t>(sum >> 32));
  append_number(bytes, static_cast<uint32_t>(sum));
}

bool is_sealed(std::string_view bytes) {
  if (bytes.size() < kSealBytes) return false;
  const size_t end = bytes.size() - kSealBytes;
  const uint64_t written = uint64_t{number_at(bytes, end)} << 32 | number_at(bytes, end + 4);
  return written == XXH3_64bits(bytes.data(), end);
}

std::string encode(const StoreMessage& message) {
  size_t size = 1;
  for (const auto& part : message.parts) size += kNumberBytes + part.size();
  if (size > kMaxMessageBytes)
    throw UsageError(fmt::format("the store: a message of {} bytes; expected at most {}", size,
                                 kMaxMessageBytes));
  std::string bytes;
  bytes.reserve(kFrontBytes + size + kSealBytes);
  append_number(bytes, static_cast<uint32_t>(size));
  append_number(bytes, ~static_cast<uint32_t>(size));
  bytes += static_cast<char>(message.code);
  for (const auto& part : message.parts) {
    append_number(bytes, static_cast<uint32_t>(part.size()));
    bytes += part;
  }
  seal(bytes);
  return bytes;
}

Taken take_message(std::string& buffer, StoreMessage& message) {
  if (buffer.size() < kFrontBytes) return Taken::incomplete;
  const uint32_t size = number_at(buffer, 0);
  if (size > kMaxMessageBytes || number_at(buffer, kNumberBytes) != ~size) return Taken::malformed;
  const size_t whole = kFrontBytes + size + kSealBytes;
  if (buffer.size() < whole) return Taken::incomplete;
  if (!is_sealed(std::string_view(buffer).substr(0, whole))) return Taken::malformed;
  auto decoded = decode(std::string_view(buffer).substr(kFrontBytes, size));
  buffer.erase(0, whole);
  if (!decoded) return Taken::malformed;
  message = std::move(*decoded);
  return Taken::whole;
}

}  // namespace tessera::comm
