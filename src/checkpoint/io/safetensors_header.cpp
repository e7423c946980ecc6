#include "checkpoint/io/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "checkpoint/io/safetensors_parser.h"
#include "tessera/error.h"

namespace tessera {

int64_t SafetensorsEntry::numel() const {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

namespace safetensors {
namespace {

std::string range(const SafetensorsEntry& entry) {
  return "[" + std::to_string(entry.begin) + ", " + std::to_string(entry.end) + ")";
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size() && i < 16; ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + (shape.size() > 16 ? ", …]" : "]");
}

[[noreturn]] void refuse(const std::string& file, const SafetensorsEntry& entry,
                         const std::string& reason) {
  throw UsageError("safetensors: " + file + ": tensor " + in_quotes(entry.name) + " " + reason);
}

// The number of bytes that dtype and shape need. Sizes of 0 count as 1 in the overflow check, so
// that strides fit into int64, too.
uint64_t expected_bytes(const std::string& file, const SafetensorsEntry& entry) {
  const int bits = dtype_bits(entry.dtype);
  if (bits == 0) refuse(file, entry, "has the unknown dtype " + in_quotes(entry.dtype));
  uint64_t strides = 1;
  bool empty = false;
  for (const int64_t size : entry.shape) {
    empty = empty || size == 0;
    if (__builtin_mul_overflow(strides, static_cast<uint64_t>(std::max<int64_t>(size, 1)),
                               &strides) ||
        strides > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) / 64)
      refuse(file, entry, "has the shape " + shape_text(entry.shape) + ", which overflows");
  }
  const uint64_t total_bits = empty ? 0 : strides * static_cast<uint64_t>(bits);
  if (total_bits % 8 != 0) {
    refuse(file, entry,
           "of shape " + shape_text(entry.shape) + " and dtype " + entry.dtype +
               " ends inside a byte");
  }
  return total_bits / 8;
}

void check_entry(const std::string& file, const SafetensorsEntry& entry, uint64_t data_bytes) {
  if (entry.begin > entry.end)
    refuse(file, entry, "has data_offsets " + range(entry) + " that run backwards");
  if (entry.end > data_bytes) {
    refuse(file, entry,
           "has data_offsets " + range(entry) + " beyond the " + std::to_string(data_bytes) +
               " data bytes of the file");
  }
  const uint64_t expected = expected_bytes(file, entry);
  if (entry.end - entry.begin != expected) {
    refuse(file, entry,
           "has data_offsets " + range(entry) + ", " + std::to_string(entry.end - entry.begin) +
               " bytes, but dtype " + entry.dtype + " and shape " + shape_text(entry.shape) +
               " need " + std::to_string(expected));
  }
}

// Every data byte belongs to exactly one tensor.
void check_cover(const std::string& file, const std::vector<SafetensorsEntry>& entries,
                 uint64_t data_bytes) {
  uint64_t covered = 0;
  const SafetensorsEntry* before = nullptr;
  for (const SafetensorsEntry& entry : entries) {
    std::string other = " the start of the data";
    if (before != nullptr) {
      other = " tensor ";
      other += in_quotes(before->name) + " " + range(*before);
    }
    if (entry.begin < covered)
      refuse(file, entry, "with data_offsets " + range(entry) + " overlaps" + other);
    if (entry.begin > covered) {
      refuse(file, entry,
             "with data_offsets " + range(entry) + " leaves a hole of " +
                 std::to_string(entry.begin - covered) + " bytes after" + other);
    }
    covered = entry.end;
    before = &entry;
  }
  if (covered != data_bytes) {
    throw UsageError("safetensors: " + file + ": " + std::to_string(data_bytes - covered) +
                     " trailing bytes that belong to no tensor: the tensors end at data offset " +
                     std::to_string(covered) + ", the file at " + std::to_string(data_bytes));
  }
}

}  // namespace

int dtype_bits(std::string_view dtype) {
  static constexpr std::pair<std::string_view, int> kBits[] = {
      {"BOOL", 8},    {"U8", 8},      {"I8", 8},          {"I16", 16},        {"U16", 16},
      {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
      {"I64", 64},    {"U64", 64},    {"F64", 64},        {"C64", 64},        {"F8_E4M3", 8},
      {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6},
      {"F6_E3M2", 6}, {"F4", 4},      {kComplex128, 128}};
  for (const auto& [name, bits] : kBits)
    if (name == dtype) return bits;
  return 0;
}

bool is_utf8(std::string_view text) {
  try {
    nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

std::string in_quotes(std::string_view name) {
  static constexpr size_t kShown = 120;
  const bool utf8 = is_utf8(name);
  std::string text = "\"";
  for (const char c : name.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || c == '"' || c == '\\' || (byte > 0x7f && !utf8)) {
      static constexpr char kHex[] = "0123456789abcdef";
      text += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      text += c;
    }
  }
  return text + (name.size() > kShown ? "…\"" : "\"");
}

namespace {

/// For a file with an impossible header size: another format that begins with the same bytes, or
/// "". A possible size may have these bytes too.
std::string other_format(const unsigned char (&prefix)[kSizeBytes]) {
  const std::string_view begin(reinterpret_cast<const char*>(prefix), kSizeBytes);
  if (begin.substr(0, 4) == "PK\x03\x04")
    return "is a zip archive, as torch::save() and torch.save() write";
  if (begin[0] == '\x80' && begin[1] >= 2 && begin[1] <= 5)
    return "is a Python pickle, as older torch.save() writes";
  return "";
}

}  // namespace

uint64_t header_size(const std::string& file, const unsigned char (&prefix)[kSizeBytes],
                     uint64_t file_bytes) {
  uint64_t size = 0;
  for (size_t i = 0; i < kSizeBytes; ++i) size |= static_cast<uint64_t>(prefix[i]) << (8 * i);
  const bool beyond = file_bytes < kSizeBytes || size > file_bytes - kSizeBytes;
  const std::string other = other_format(prefix);
  if ((size > kMaxHeaderBytes || beyond) && !other.empty())
    throw UsageError("safetensors: " + file + ": " + other + "; expected a safetensors file");
  if (size > kMaxHeaderBytes) {
    throw UsageError("safetensors: " + file + ": header size " + std::to_string(size) +
                     " is above the format's limit of " + std::to_string(kMaxHeaderBytes) +
                     " bytes (is this a safetensors file?)");
  }
  if (beyond) {
    throw UsageError("safetensors: " + file + ": header size " + std::to_string(size) +
                     " goes beyond the file's " + std::to_string(file_bytes) + " bytes");
  }
  return size;
}

// [Note: complex128] The format has no complex numbers of two doubles. Such a tensor is one of
// doubles, with a last dimension of 2, whose name is in the list of the metadata's kComplexKey. So
// other programs can read it.
namespace {

/// The tensors of the list become complex.
void join_pairs(const std::string& file, Header& header) {
  const auto text = header.metadata.find(kComplexKey);
  if (text == header.metadata.end()) return;
  const auto names = nlohmann::json::parse(text->second, nullptr, /*allow_exceptions=*/false);
  const auto fail = [&](const std::string& what) {
    throw UsageError("safetensors: " + file + ": " + kMetadataKey + ", key \"" + kComplexKey +
                     "\": " + what +
                     "; expected a list of names of F64 tensors whose last size is 2");
  };
  if (!names.is_array()) fail("the text is not a list");
  std::map<std::string, SafetensorsEntry*> entries;
  for (auto& entry : header.entries) entries[entry.name] = &entry;
  for (const auto& name : names) {
    const auto found = name.is_string() ? entries.find(name) : entries.end();
    if (found == entries.end()) fail("an element names no tensor");
    auto& dtype = found->second->dtype;
    auto& shape = found->second->shape;
    if (dtype != "F64" || shape.empty() || shape.back() != 2) fail(in_quotes(found->first));
    dtype = kComplex128;
    shape.pop_back();
  }
  header.metadata.erase(text);
}

/// The reverse.
Header with_pairs(const std::string& file, Header header) {
  if (header.metadata.contains(kComplexKey))
    throw UsageError("safetensors: " + file + ": the metadata key \"" + kComplexKey +
                     "\" is reserved for the names of complex tensors");
  auto names = nlohmann::json::array();
  for (auto& entry : header.entries) {
    if (entry.dtype != kComplex128) continue;
    names.push_back(entry.name);
    entry.dtype = "F64";
    entry.shape.push_back(2);
  }
  if (!names.empty()) header.metadata[kComplexKey] = names.dump();
  return header;
}

}  // namespace

Header parse_header(const std::string& file, std::string_view text, uint64_t data_bytes) {
  Header header = parse_header_json(file, text);
  for (const SafetensorsEntry& entry : header.entries) check_entry(file, entry, data_bytes);
  join_pairs(file, header);
  std::sort(header.entries.begin(), header.entries.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
              return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
            });
  check_cover(file, header.entries, data_bytes);
  return header;
}

std::string format_header(const std::string& file, const Header& given) {
  const Header header = with_pairs(file, given);
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  std::string text;
  try {
    if (!header.metadata.empty()) json[kMetadataKey] = header.metadata;
    text = json.dump();
    text.pop_back();
    for (const SafetensorsEntry& entry : header.entries) {
      if (!is_utf8(entry.name)) {
        throw UsageError("safetensors: " + file + ": the tensor name " + in_quotes(entry.name) +
                         " is not valid UTF-8");
      }
      const nlohmann::ordered_json value = {{"dtype", entry.dtype},
                                            {"shape", entry.shape},
                                            {"data_offsets", {entry.begin, entry.end}}};
      if (text.size() > 1) text += ',';
      text += nlohmann::json(entry.name).dump();
      text += ':';
      text += value.dump();
    }
  } catch (const nlohmann::json::exception&) {
    throw UsageError("safetensors: " + file + ": a metadata text is not valid UTF-8");
  }
  text += "}";
  text.append((kSizeBytes - text.size() % kSizeBytes) % kSizeBytes, ' ');
  if (text.size() > kMaxHeaderBytes) {
    throw UsageError("safetensors: " + file + ": the header would take " +
                     std::to_string(text.size()) + " bytes, above the format's limit of " +
                     std::to_string(kMaxHeaderBytes));
  }
  std::string prefix;
  for (size_t i = 0; i < kSizeBytes; ++i)
    prefix += static_cast<char>(text.size() >> (8 * i) & 0xff);
  return prefix + text;
}

}  // namespace safetensors
}  // namespace tessera
