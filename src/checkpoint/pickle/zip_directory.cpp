#include "checkpoint/pickle/zip_directory.h"

#include <algorithm>
#include <array>
#include <unordered_set>

#include <fmt/format.h>

#include "checkpoint/io/safetensors_header.h"
#include "tessera/error.h"

namespace tessera::pickle {
namespace {

using safetensors::in_quotes;

constexpr uint64_t kEndBytes = 22, kLocatorBytes = 20, kEnd64Bytes = 56;
constexpr uint64_t kEntryBytes = 46, kLocalBytes = 30;
constexpr uint64_t kMax16 = 0xffff, kMax32 = 0xffffffff;

/// Little-endian numbers in a text that was read from the file.
uint64_t number(const std::string& text, size_t at, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = bytes; i-- > 0;) value = value << 8 | static_cast<unsigned char>(text[at + i]);
  return value;
}

struct Place {
  uint64_t begin = 0, bytes = 0, count = 0;
};

class DirectoryReader {
 public:
  DirectoryReader(const std::string& where, uint64_t file_bytes, const ReadAt& read)
      : where_(where), file_bytes_(file_bytes), read_(read) {}

  std::vector<ZipRecord> records() {
    const Place place = find();
    const std::string text = read(place.bytes, place.begin);
    size_t at = 0;
    for (uint64_t i = 0; i < place.count; ++i) at = entry(text, at);
    if (at != text.size()) refuse("its directory has other bytes than its records");
    check_places(place.begin);
    return std::move(records_);
  }

 private:
  [[noreturn]] void refuse(const std::string& reason) const {
    throw UsageError(where_ + "is no sound zip archive: " + reason);
  }

  std::string read(uint64_t bytes, uint64_t offset) const {
    if (bytes > file_bytes_ || offset > file_bytes_ - bytes)
      refuse(fmt::format("{} bytes at offset {} are not within its {} bytes", bytes, offset,
                         file_bytes_));
    std::string text(static_cast<size_t>(bytes), '\0');
    if (bytes > 0) read_(text.data(), text.size(), offset);
    return text;
  }

  /// The directory, by the record at the very end of the file: PyTorch writes no archive comment.
  Place find() const {
    if (file_bytes_ < kEndBytes) refuse("it is too short");
    const uint64_t at = file_bytes_ - kEndBytes;
    const std::string end = read(kEndBytes, at);
    if (end.compare(0, 4, "PK\x05\x06") != 0)
      refuse("it does not end with a zip directory; the file may be cut off");
    Place place{number(end, 16, 4), number(end, 12, 4), number(end, 10, 2)};
    if (number(end, 4, 2) == kMax16 || place.count == kMax16 || place.bytes == kMax32 ||
        place.begin == kMax32)
      place = find_64(at);
    if (place.bytes > kMaxDirectoryBytes)
      refuse(fmt::format("its directory has {} bytes; expected at most {}", place.bytes,
                         kMaxDirectoryBytes));
    if (place.count > place.bytes / kEntryBytes)
      refuse(fmt::format("{} records do not fit into a directory of {} bytes", place.count,
                         place.bytes));
    if (place.begin > at || place.bytes > at - place.begin)
      refuse("its directory is not within the file");
    return place;
  }

  Place find_64(uint64_t end) const {
    if (end < kLocatorBytes) refuse("it is too short");
    const std::string locator = read(kLocatorBytes, end - kLocatorBytes);
    if (locator.compare(0, 4, "PK\x06\x07") != 0) refuse("its zip64 locator is missing");
    const std::string text = read(kEnd64Bytes, number(locator, 8, 8));
    if (text.compare(0, 4, "PK\x06\x06") != 0) refuse("its zip64 directory is missing");
    return {number(text, 48, 8), number(text, 40, 8), number(text, 32, 8)};
  }

  /// Reads the entry at `at` of the directory; returns the place of the next one.
  size_t entry(const std::string& text, size_t at) {
    if (text.size() - at < kEntryBytes || text.compare(at, 4, "PK\x01\x02") != 0)
      refuse("its directory is damaged");
    const uint64_t flags = number(text, at + 8, 2), method = number(text, at + 10, 2);
    const uint64_t name_bytes = number(text, at + 28, 2), extra_bytes = number(text, at + 30, 2);
    const uint64_t all = kEntryBytes + name_bytes + extra_bytes + number(text, at + 32, 2);
    if (all > text.size() - at) refuse("its directory is damaged");
    ZipRecord record;
    record.name = text.substr(at + kEntryBytes, name_bytes);
    Stored stored{number(text, at + 24, 4), number(text, at + 20, 4), number(text, at + 42, 4)};
    read_extra_64(text.substr(at + kEntryBytes + name_bytes, extra_bytes), record.name, stored);
    if ((flags & 1) != 0) refuse("the record " + in_quotes(record.name) + " is encrypted");
    if (method != 0 && method != 8)
      refuse(
          fmt::format("the record {} has compression method {}", in_quotes(record.name), method));
    record.compressed = method == 8;
    record.bytes = stored.bytes;
    record.crc = static_cast<uint32_t>(number(text, at + 16, 4));
    if (!record.compressed && stored.bytes != stored.in_file)
      refuse("the record " + in_quotes(record.name) + " has two sizes");
    places_.push_back({stored.header, stored.in_file, records_.size()});
    records_.push_back(std::move(record));
    return at + all;
  }

  struct Stored {
    uint64_t bytes, in_file, header;
  };

  /// The zip64 field holds each of the three numbers that is 0xffffffff in the entry.
  void read_extra_64(const std::string& extra, const std::string& name, Stored& stored) const {
    size_t at = 0;
    while (extra.size() - at >= 4) {
      const uint64_t id = number(extra, at, 2), bytes = number(extra, at + 2, 2);
      at += 4;
      if (bytes > extra.size() - at) break;
      size_t field = at;
      for (uint64_t* value : {&stored.bytes, &stored.in_file, &stored.header}) {
        if (id != 1 || *value != kMax32) continue;
        if (field + 8 > at + bytes)
          refuse("the record " + in_quotes(name) + " has a damaged zip64 field");
        *value = number(extra, field, 8);
        field += 8;
      }
      if (id == 1) return;
      at += bytes;
    }
  }

  /// Finds the data behind each record's own header. Records must not overlap.
  void check_places(uint64_t directory) {
    std::sort(places_.begin(), places_.end(),
              [](const auto& a, const auto& b) { return a.header < b.header; });
    std::vector<ZipRecord> sorted;
    std::unordered_set<std::string> names;
    uint64_t free_from = 0;
    for (const auto& place : places_) {
      ZipRecord& record = records_[place.record];
      const std::string name = in_quotes(record.name);
      if (place.header < free_from) refuse("the record " + name + " overlaps another one");
      const std::string local = read(kLocalBytes, place.header);
      if (local.compare(0, 4, "PK\x03\x04") != 0)
        refuse("the record " + name + " has no header at its offset");
      record.offset = place.header + kLocalBytes + number(local, 26, 2) + number(local, 28, 2);
      if (record.offset > directory || place.in_file > directory - record.offset)
        refuse(
            fmt::format("the record {} of {} bytes is not within the file", name, place.in_file));
      if (!names.insert(record.name).second) refuse("the record " + name + " is there twice");
      free_from = record.offset + place.in_file;
      sorted.push_back(std::move(record));
    }
    records_ = std::move(sorted);
  }

  struct RecordPlace {
    uint64_t header, in_file;
    size_t record;
  };

  const std::string& where_;
  uint64_t file_bytes_;
  const ReadAt& read_;
  std::vector<ZipRecord> records_;
  std::vector<RecordPlace> places_;
};

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0xedb88320u : 0u);
    table[byte] = value;
  }
  return table;
}

}  // namespace

uint32_t zip_crc(std::string_view data) {
  static constexpr auto kTable = crc_table();
  uint32_t crc = 0xffffffff;
  for (const char byte : data)
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  return ~crc;
}

std::vector<ZipRecord> read_zip_directory(const std::string& where, uint64_t file_bytes,
                                          const ReadAt& read) {
  return DirectoryReader(where, file_bytes, read).records();
}

}  // namespace tessera::pickle
