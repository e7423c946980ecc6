#include "checkpoint/io/safetensors_parser.h"

#include <limits>
#include <unordered_set>

#include <nlohmann/json.hpp>

#include "tessera/error.h"

namespace tessera::safetensors {
namespace {

// Checks the parser's events against the only structure that a header may have. Nothing is nested
// deeper than the list of an entry, so the depth is bounded for any text. Errors are thrown.
class HeaderHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderHandler(const std::string& file) : file_(file) {}

  Header take() { return std::move(header_); }

  bool null() override;
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_float(number_float_t, const string_t& text) override {
    return unexpected("the number " + text.substr(0, 40));
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }
  bool number_integer(number_integer_t value) override {
    return unexpected("the number " + std::to_string(value));
  }
  bool number_unsigned(number_unsigned_t value) override;
  bool string(string_t& value) override;
  bool start_object(std::size_t) override;
  bool end_object() override;
  bool key(string_t& value) override;
  bool start_array(std::size_t) override;
  bool end_array() override;
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception& error) override;

 private:
  enum class Place {
    start,
    top,
    metadata_value,
    metadata,
    metadata_text,
    entry_value,
    entry,
    dtype,
    shape_value,
    shape,
    offsets_value,
    offsets,
    end
  };

  SafetensorsEntry& entry() { return header_.entries.back(); }
  const char* expected() const;
  bool unexpected(const std::string& what) {
    refuse(what + " where " + expected() + " is expected");
  }
  [[noreturn]] void refuse(const std::string& reason) const;
  void entry_key(const std::string& name);

  const std::string& file_;
  Header header_;
  std::unordered_set<std::string> names_;
  Place place_ = Place::start;
  bool has_metadata_ = false;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  int offsets_seen_ = 0;
  std::string metadata_key_;
};

const char* HeaderHandler::expected() const {
  switch (place_) {
    case Place::start:
      return "the header's object";
    case Place::metadata_value:
      return "an object of strings";
    case Place::metadata_text:
      return "a string";
    case Place::entry_value:
      return "an object with dtype, shape and data_offsets";
    case Place::dtype:
      return "the name of a dtype";
    case Place::shape_value:
      return "a list of sizes";
    case Place::shape:
      return "a size (an integer from 0 to 2^63-1)";
    case Place::offsets_value:
      return "a list of two offsets";
    case Place::offsets:
      return offsets_seen_ < 2 ? "an offset (an integer from 0 to 2^64-1)"
                               : "the end of the two offsets";
    default:
      return "a key";
  }
}

void HeaderHandler::refuse(const std::string& reason) const {
  std::string where = "header";
  if (place_ == Place::metadata_text)
    where = std::string(kMetadataKey) + ", key " + in_quotes(metadata_key_);
  else if (place_ == Place::metadata_value || place_ == Place::metadata) where = kMetadataKey;
  else if (place_ >= Place::entry_value && place_ < Place::end)
    where = "tensor " + in_quotes(header_.entries.back().name);
  throw UsageError("safetensors: " + file_ + ": " + where + ": " + reason);
}

bool HeaderHandler::null() {
  if (place_ != Place::metadata_value) return unexpected("null");
  place_ = Place::top;  // as the reference implementation reads it
  return true;
}

bool HeaderHandler::number_unsigned(number_unsigned_t value) {
  const std::string text = "the number " + std::to_string(value);
  if (place_ == Place::shape) {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) unexpected(text);
    entry().shape.push_back(static_cast<int64_t>(value));
    return true;
  }
  if (place_ == Place::offsets && offsets_seen_ < 2) {
    (offsets_seen_++ == 0 ? entry().begin : entry().end) = value;
    return true;
  }
  return unexpected(text);
}

bool HeaderHandler::string(string_t& value) {
  if (place_ == Place::metadata_text) {
    header_.metadata[metadata_key_] = value;
    place_ = Place::metadata;
    return true;
  }
  if (place_ == Place::dtype) {
    if (dtype_bits(value) == 0) refuse("unknown dtype " + in_quotes(value));
    entry().dtype = value;
    place_ = Place::entry;
    return true;
  }
  return unexpected("the string " + in_quotes(value));
}

bool HeaderHandler::start_object(std::size_t) {
  switch (place_) {
    case Place::start:
      place_ = Place::top;
      return true;
    case Place::metadata_value:
      place_ = Place::metadata;
      return true;
    case Place::entry_value:
      place_ = Place::entry;
      return true;
    default:
      return unexpected("an object");
  }
}

bool HeaderHandler::end_object() {
  if (place_ == Place::top) {
    place_ = Place::end;
    return true;
  }
  if (place_ == Place::entry && !(has_dtype_ && has_shape_ && has_offsets_)) {
    refuse(std::string("the key \"") +
           (!has_dtype_   ? "dtype"
            : !has_shape_ ? "shape"
                          : "data_offsets") +
           "\" is missing");
  }
  place_ = Place::top;
  return true;
}

bool HeaderHandler::key(string_t& value) {
  if (place_ == Place::entry) {
    entry_key(value);
  } else if (place_ == Place::metadata) {
    if (header_.metadata.count(value) != 0) refuse("the key " + in_quotes(value) + " occurs twice");
    metadata_key_ = value;
    place_ = Place::metadata_text;
  } else if (value == kMetadataKey) {
    if (std::exchange(has_metadata_, true))
      refuse(std::string("the key \"") + kMetadataKey + "\" occurs twice");
    place_ = Place::metadata_value;
  } else {
    if (!names_.insert(value).second) refuse("the tensor " + in_quotes(value) + " occurs twice");
    header_.entries.emplace_back().name = value;
    has_dtype_ = has_shape_ = has_offsets_ = false;
    offsets_seen_ = 0;
    place_ = Place::entry_value;
  }
  return true;
}

void HeaderHandler::entry_key(const std::string& name) {
  bool* seen = nullptr;
  Place next = Place::entry;
  if (name == "dtype") {
    seen = &has_dtype_;
    next = Place::dtype;
  } else if (name == "shape") {
    seen = &has_shape_;
    next = Place::shape_value;
  } else if (name == "data_offsets") {
    seen = &has_offsets_;
    next = Place::offsets_value;
  } else {
    refuse("unknown key " + in_quotes(name) + " (known: dtype, shape, data_offsets)");
  }
  if (std::exchange(*seen, true)) refuse("the key \"" + name + "\" occurs twice");
  place_ = next;
}

bool HeaderHandler::start_array(std::size_t) {
  switch (place_) {
    case Place::shape_value:
      place_ = Place::shape;
      return true;
    case Place::offsets_value:
      place_ = Place::offsets;
      return true;
    default:
      return unexpected("a list");
  }
}

bool HeaderHandler::end_array() {
  if (place_ == Place::offsets && offsets_seen_ != 2)
    refuse("data_offsets has " + std::to_string(offsets_seen_) + " numbers, two are expected");
  place_ = Place::entry;
  return true;
}

bool HeaderHandler::parse_error(std::size_t position, const std::string&,
                                const nlohmann::json::exception&) {
  throw UsageError("safetensors: " + file_ + ": the header is not valid JSON (UTF-8) at byte " +
                   std::to_string(position + kSizeBytes) + " of the file");
}

}  // namespace

Header parse_header_json(const std::string& file, std::string_view text) {
  if (text.empty() || text.front() != '{')
    throw UsageError("safetensors: " + file + ": the header must begin with '{'");
  // The lexer would treat a zero byte as the end of its input. JSON has no zero bytes.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos) {
    throw UsageError("safetensors: " + file +
                     ": the header is not valid JSON: a zero byte at byte " +
                     std::to_string(zero + kSizeBytes) + " of the file");
  }
  HeaderHandler handler(file);
  nlohmann::json::sax_parse(text.begin(), text.end(), &handler);
  return handler.take();
}

}  // namespace tessera::safetensors
