#include "data/npy_header.h"

#include <algorithm>

#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::string_view kMagicBytes("\x93NUMPY", 6);
// The limit of version 1. NumPy itself refuses more than 10,000 by default.
constexpr size_t kMostHeaderBytes = 65535;
constexpr size_t kMostDimensions = 32;

struct TypeName {
  NpyArray::Type type;
  const char* name;
  int64_t width;
};

constexpr TypeName kTypes[] = {
    {NpyArray::Type::f2, "f2", 2},      {NpyArray::Type::f4, "f4", 4},
    {NpyArray::Type::f8, "f8", 8},      {NpyArray::Type::i1, "i1", 1},
    {NpyArray::Type::i2, "i2", 2},      {NpyArray::Type::i4, "i4", 4},
    {NpyArray::Type::i8, "i8", 8},      {NpyArray::Type::u1, "u1", 1},
    {NpyArray::Type::boolean, "b1", 1},
};

[[noreturn]] void refuse_npy(const std::string& path, const std::string& reason) {
  throw UsageError("NpyDataset: " + path + ": " + reason);
}

/// Text from a file for a message: at most 40 characters, with other than printable ASCII replaced.
std::string printable(std::string_view text) {
  std::string result;
  for (const char c : text.substr(0, 40)) result += c >= ' ' && c <= '~' ? c : '?';
  return "\"" + result + (text.size() > 40 ? "…\"" : "\"");
}

/// Parses the Python dictionary of three keys that NumPy writes:
/// {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
class HeaderParser {
 public:
  HeaderParser(const std::string& path, std::string_view text) : path_(path), text_(text) {}

  NpyHeader parse() {
    expect('{');
    while (!accept('}')) {
      entry(quoted());
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip();
    if (at_ != text_.size()) fail("something follows the dictionary");
    if (!has_descr_ || !has_order_ || !has_shape_) {
      fail(std::string(!has_descr_   ? "descr"
                       : !has_order_ ? "fortran_order"
                                     : "shape") +
           " is missing");
    }
    return header_;
  }

 private:
  [[noreturn]] void fail(const std::string& reason) const {
    refuse_npy(path_, "its header is not as NumPy writes it: " + reason + " (at byte " +
                          std::to_string(at_) + " of " + printable(text_) + ")");
  }

  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool accept(char c) {
    skip();
    const bool here = at_ < text_.size() && text_[at_] == c;
    at_ += here ? 1 : 0;
    return here;
  }
  void expect(char c) {
    if (!accept(c)) fail(std::string("expected '") + c + "'");
  }
  bool accept_word(std::string_view word) {
    skip();
    const bool here = text_.substr(at_).starts_with(word);
    at_ += here ? word.size() : 0;
    return here;
  }

  std::string_view quoted() {
    skip();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    const size_t end =
        quote == '\'' || quote == '"' ? text_.find(quote, at_ + 1) : std::string_view::npos;
    if (end == std::string_view::npos) fail("expected a quoted name");
    const std::string_view inside = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return inside;
  }

  void once(bool& seen, const char* key) {
    if (seen) fail(std::string(key) + " is given twice");
    seen = true;
  }

  void entry(std::string_view key) {
    expect(':');
    if (key == "descr") {
      once(has_descr_, "descr");
      descr();
    } else if (key == "fortran_order") {
      once(has_order_, "fortran_order");
      if (accept_word("True"))
        refuse_npy(path_, "is in Fortran order, expected C order (numpy.ascontiguousarray)");
      if (!accept_word("False")) fail("fortran_order is neither True nor False");
    } else if (key == "shape") {
      once(has_shape_, "shape");
      shape();
    } else {
      fail("unknown key " + printable(key));
    }
  }

  void descr() {
    if (accept('[')) refuse_npy(path_, "is of a structured type, expected plain numbers");
    const std::string_view text = quoted();
    for (const TypeName& known : kTypes) {
      if (text.size() == 3 && text.substr(1) == known.name &&
          (text[0] == '<' || (known.width == 1 && (text[0] == '|' || text[0] == '>')))) {
        header_.type = known.type;
        return;
      }
    }
    refuse_npy(path_,
               "is of type " + printable(text) +
                   ", expected <f2, <f4, <f8, |i1, <i2, <i4, <i8, |u1 or |b1 (little-endian)");
  }

  int64_t integer() {
    skip();
    const size_t begin = at_;
    int64_t value = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_)
      if (__builtin_mul_overflow(value, int64_t{10}, &value) ||
          __builtin_add_overflow(value, int64_t{text_[at_] - '0'}, &value))
        fail("a dimension exceeds 2^63");
    if (at_ == begin) fail("expected a dimension of the shape");
    return value;
  }

  void shape() {
    expect('(');
    while (!accept(')')) {
      if (header_.shape.size() == kMostDimensions)
        fail("more than " + std::to_string(kMostDimensions) + " dimensions");
      header_.shape.push_back(integer());
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
  }

  const std::string& path_;
  std::string_view text_;
  size_t at_ = 0;
  NpyHeader header_;
  bool has_descr_ = false, has_order_ = false, has_shape_ = false;
};

size_t little_endian(std::string_view bytes) {
  size_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

}  // namespace

int64_t width_of(NpyArray::Type type) { return kTypes[static_cast<size_t>(type)].width; }
const char* name_of(NpyArray::Type type) { return kTypes[static_cast<size_t>(type)].name; }

NpyHeader parse_npy_header(const std::string& path, std::string_view bytes) {
  if (bytes.empty()) refuse_npy(path, "is empty");
  if (!bytes.starts_with(kMagicBytes)) {
    refuse_npy(path, bytes.starts_with("PK")
                         ? "is an archive (.npz), expected one array (.npy)"
                         : "is not a .npy file: it does not begin with \\x93NUMPY");
  }
  if (bytes.size() < 12)
    refuse_npy(path, "has " + std::to_string(bytes.size()) + " bytes, fewer than a header");
  const int version = static_cast<unsigned char>(bytes[6]);
  if (version < 1 || version > 3 || bytes[7] != 0) {
    refuse_npy(path, "is of version " + std::to_string(version) + "." +
                         std::to_string(static_cast<unsigned char>(bytes[7])) +
                         ", expected 1.0, 2.0 or 3.0");
  }
  const size_t begin = version == 1 ? 10 : 12, length = little_endian(bytes.substr(8, begin - 8));
  if (length > kMostHeaderBytes || length > bytes.size() - begin) {
    refuse_npy(path, "says that its header has " + std::to_string(length) + " bytes; " +
                         std::to_string(bytes.size() - begin) + " follow, and " +
                         std::to_string(kMostHeaderBytes) + " are the most");
  }
  NpyHeader header = HeaderParser(path, bytes.substr(begin, length)).parse();
  header.data_begin = static_cast<int64_t>(begin + length);
  return header;
}

}  // namespace tessera
