#include "checkpoint/io/safetensors_parser.h"

#include <limits>
#include <unordered_set>

#include <nlohmann/json.hpp>

#include "tessera/error.h"

namespace tessera::safetensors {
namespace {

using nlohmann::json;
using Event = json::parse_event_t;

std::string described(const json& value) {
  if (value.is_null()) return "null";
  if (value.is_boolean()) return "a boolean";
  if (value.is_array()) return "a list";
  if (value.is_object()) return "an object";
  if (value.is_string()) return "the string " + in_quotes(value.get_ref<const std::string&>());
  return "the number " + value.dump();
}

/// Takes the parser's events. The value of a top-level key is checked and dropped when it is
/// complete, so the memory is bounded by the largest one.
class HeaderReader {
 public:
  explicit HeaderReader(const std::string& file) : file_(file), where_("header") {}

  Header take() { return std::move(header_); }

  /// Returns false for a value that has been used.
  bool take(int depth, Event event, const json& value) {
    constexpr int kDeepest = 3;  // the list in an entry, with one more for a better error
    if (event == Event::key) take_key(depth, value.get_ref<const std::string&>());
    if (event == Event::object_start && depth == 1) keys_.clear();
    const bool begins = event == Event::object_start || event == Event::array_start;
    if (begins && depth > kDeepest) refuse("is nested too deeply");
    if (event == Event::array_start && depth == 1) expect(json::array(), expected_on_top());
    if (begins || event == Event::key || depth != 1) return true;
    if (top_ == kMetadataKey) take_metadata(value);
    else take_entry(value);
    where_ = "header";
    return false;
  }

 private:
  void take_key(int depth, const std::string& key) {
    if (depth == 1) {
      const bool metadata = key == kMetadataKey;
      if (!tops_.insert(key).second)
        refuse((metadata ? "the key " : "the tensor ") + in_quotes(key) + " occurs twice");
      top_ = key;
      where_ = metadata ? key : "tensor " + in_quotes(key);
    } else if (depth == 2) {
      if (top_ != kMetadataKey && key != "dtype" && key != "shape" && key != "data_offsets")
        refuse("unknown key " + in_quotes(key) + " (known: dtype, shape, data_offsets)");
      if (!keys_.insert(key).second) refuse("the key " + in_quotes(key) + " occurs twice");
    }
  }

  void take_metadata(const json& value) {
    if (value.is_null()) return;  // as the reference implementation reads it
    if (!value.is_object()) expect(value, expected_on_top());
    for (const auto& [key, text] : value.items()) {
      where_ = kMetadataKey;
      where_ += ", key " + in_quotes(key);
      if (!text.is_string()) expect(text, "a string");
      header_.metadata[key] = text;
    }
  }

  void take_entry(const json& value) {
    if (!value.is_object()) expect(value, expected_on_top());
    for (const char* key : {"dtype", "shape", "data_offsets"})
      if (!value.contains(key)) refuse(std::string("the key \"") + key + "\" is missing");
    SafetensorsEntry& entry = header_.entries.emplace_back();
    entry.name = top_;
    const json &dtype = value["dtype"], &shape = value["shape"], &offsets = value["data_offsets"];
    if (!dtype.is_string()) expect(dtype, "the name of a dtype");
    entry.dtype = dtype;
    if (dtype_bits(entry.dtype) == 0) refuse("unknown dtype " + in_quotes(entry.dtype));
    if (!shape.is_array()) expect(shape, "a list of sizes");
    for (const json& size : shape) {
      constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
      if (!size.is_number_unsigned() || size.get<uint64_t>() > kMost)
        expect(size, "a size (an integer from 0 to 2^63-1)");
      entry.shape.push_back(size);
    }
    if (!offsets.is_array()) expect(offsets, "a list of two offsets");
    for (const json& offset : offsets)
      if (!offset.is_number_unsigned()) expect(offset, "an offset (an integer from 0 to 2^64-1)");
    if (offsets.size() > 2) expect(offsets[2], "the end of the two offsets");
    if (offsets.size() != 2)
      refuse("data_offsets has " + std::to_string(offsets.size()) + " numbers, two are expected");
    entry.begin = offsets[0];
    entry.end = offsets[1];
  }

  const char* expected_on_top() const {
    return top_ == kMetadataKey ? "an object of strings"
                                : "an object with dtype, shape and data_offsets";
  }
  [[noreturn]] void expect(const json& found, const char* expected) const {
    refuse(described(found) + " where " + expected + " is expected");
  }
  [[noreturn]] void refuse(const std::string& reason) const {
    throw UsageError("safetensors: " + file_ + ": " + where_ + ": " + reason);
  }

  const std::string& file_;
  Header header_;
  std::string where_, top_;                      // for errors; the last top-level key
  std::unordered_set<std::string> tops_, keys_;  // of the header, and of the value of top_
};

}  // namespace

Header parse_header_json(const std::string& file, std::string_view text) {
  const std::string where = "safetensors: " + file + ": the header ";
  if (text.empty() || text.front() != '{') throw UsageError(where + "must begin with '{'");
  // The lexer would treat a zero byte as the end of its input. JSON has no zero bytes.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos)
    throw UsageError(where + "is not valid JSON: a zero byte at byte " +
                     std::to_string(zero + kSizeBytes) + " of the file");
  HeaderReader reader(file);
  try {
    const json rest = json::parse(text, [&](int depth, Event event, json& value) {
      return reader.take(depth, event, value);
    });
  } catch (const json::parse_error& error) {
    throw UsageError(where + "is not valid JSON (UTF-8) at byte " +
                     std::to_string(error.byte + kSizeBytes) + " of the file");
  } catch (const json::exception& error) {
    throw UsageError(where + "is not valid: " + error.what());
  }
  return reader.take();
}

}  // namespace tessera::safetensors
