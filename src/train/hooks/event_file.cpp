#include "train/hooks/event_file.h"

#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include <fmt/format.h>
#include <unistd.h>

#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "train/hooks/crc32c.h"

namespace tessera::train {
namespace {

// Protobuf's wire format: a key (field number and kind), then a varint, a number of fixed length in
// little-endian order, or a length with that many bytes.
enum class Wire : uint32_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

void add_varint(std::string& to, uint64_t value) {
  for (; value >= 0x80; value >>= 7) to += static_cast<char>(value | 0x80);
  to += static_cast<char>(value);
}

void add_key(std::string& to, uint32_t field, Wire wire) {
  add_varint(to, (field << 3) | static_cast<uint32_t>(wire));
}

template <class Number>
void add_fixed(std::string& to, Number value) {
  for (size_t i = 0; i < sizeof(value); ++i) to += static_cast<char>(value >> (8 * i));
}

void add_double(std::string& to, uint32_t field, double value) {
  add_key(to, field, Wire::fixed64);
  add_fixed(to, std::bit_cast<uint64_t>(value));
}

void add_float(std::string& to, uint32_t field, double value) {
  add_key(to, field, Wire::fixed32);
  add_fixed(to, std::bit_cast<uint32_t>(static_cast<float>(value)));
}

void add_bytes(std::string& to, uint32_t field, const std::string& bytes) {
  add_key(to, field, Wire::bytes);
  add_varint(to, bytes.size());
  to += bytes;
}

void add_doubles(std::string& to, uint32_t field, const std::vector<double>& values) {
  std::string packed;
  for (const double value : values) add_fixed(packed, std::bit_cast<uint64_t>(value));
  add_bytes(to, field, packed);
}

/// An event of now; the caller adds its content.
std::string event_of(int64_t step) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  std::string event;
  add_double(event, 1, now.count());
  add_key(event, 2, Wire::varint);
  add_varint(event, static_cast<uint64_t>(step));
  return event;
}

std::string message_of(const Histogram& histogram) {
  std::string text;
  add_double(text, 1, histogram.min);
  add_double(text, 2, histogram.max);
  add_double(text, 3, histogram.count);
  add_double(text, 4, histogram.sum);
  add_double(text, 5, histogram.sum_of_squares);
  add_doubles(text, 6, histogram.limits);
  add_doubles(text, 7, histogram.counts);
  return text;
}

}  // namespace

EventFile::EventFile(const std::string& folder, int64_t first_step) {
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  if (failure) throw Error(folder + ": cannot make the folder: " + failure.message());
  char host[256] = "host";
  ::gethostname(host, sizeof(host) - 1);
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(
                           std::chrono::system_clock::now().time_since_epoch())
                           .count();
  for (int number = 0; !file_; ++number) {
    path_ = fmt::format("{}/events.out.tfevents.{:010d}.{}.{}.{}", folder, seconds, host,
                        ::getpid(), number);
    file_.reset(std::fopen(path_.c_str(), "wbxe"));  // x: fails where the file exists
    if (!file_ && errno != EEXIST) throw Error(path_ + ": " + std::strerror(errno));
  }
  std::string version = event_of(0);
  add_bytes(version, 3, "brain.Event:2");
  write(version);
  if (first_step > 0) {
    std::string session = event_of(first_step), start;
    add_key(start, 1, Wire::varint);
    add_varint(start, 1);  // SessionLog::START
    add_bytes(session, 7, start);
    write(session);
  }
}

void EventFile::scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  std::string summary;
  for (const auto& [tag, number] : values) {
    std::string value;
    add_bytes(value, 1, tag);
    add_float(value, 2, number);
    add_bytes(summary, 1, value);
  }
  std::string event = event_of(step);
  add_bytes(event, 5, summary);
  write(event);
}

void EventFile::histograms(int64_t step,
                           const std::vector<std::pair<std::string, Histogram>>& values) {
  std::string summary;
  for (const auto& [tag, histogram] : values) {
    std::string value;
    add_bytes(value, 1, tag);
    add_bytes(value, 5, message_of(histogram));
    add_bytes(summary, 1, value);
  }
  std::string event = event_of(step);
  add_bytes(event, 5, summary);
  write(event);
}

void EventFile::write(const std::string& event) {
  std::string length, frame;
  add_fixed(length, static_cast<uint64_t>(event.size()));
  frame = length;
  add_fixed(frame, masked_crc32c(length));
  frame += event;
  add_fixed(frame, masked_crc32c(event));
  if (!write_through(file_.get(), frame))
    throw Error(path_ + ": cannot write: " + std::strerror(errno));
}

}  // namespace tessera::train
