#include "data/npy_header.h"

#include <utility>

#include <nlohmann/json.hpp>

#include "tessera/error.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

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

/// Text from a file for a message: at most 40 characters; all but printable ASCII is replaced.
std::string printable(std::string_view text) {
  std::string result;
  for (const char c : text.substr(0, 40)) result += c >= ' ' && c <= '~' ? c : '?';
  return "\"" + result + (text.size() > 40 ? "…\"" : "\"");
}

/// The Python dictionary that NumPy writes, as JSON, which has other quotes and words, no tuples
/// and no commas at the end: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
Json json_of(std::string_view python) {
  std::string text;
  for (size_t i = 0; i < python.size(); ++i) {
    const char c = python[i];
    const size_t next = c == ',' ? python.find_first_not_of(" \n", i + 1) : python.npos;
    if (next != python.npos && std::string_view(")]}").find(python[next]) != python.npos) continue;
    text += c == '\'' ? '"' : c == '(' ? '[' : c == ')' ? ']' : c;
  }
  for (const auto& [word, json] : {std::pair("True", "true"), std::pair("False", "false")})
    if (const size_t at = text.find(word); at != text.npos)
      text.replace(at, std::string_view(word).size(), json);
  return Json::parse(text, nullptr, false);
}

NpyArray::Type type_of(const std::string& path, const Json& descr) {
  if (descr.is_array()) refuse_npy(path, "is of a structured type, expected plain numbers");
  const std::string text = descr.is_string() ? descr.get<std::string>() : descr.dump();
  for (const TypeName& known : kTypes)
    if (text.size() == 3 && text.substr(1) == known.name &&
        (text[0] == '<' || (known.width == 1 && (text[0] == '|' || text[0] == '>'))))
      return known.type;
  refuse_npy(path, "is of type " + printable(text) +
                       ", expected <f2, <f4, <f8, |i1, <i2, <i4, <i8, |u1 or |b1 (little-endian)");
}

NpyHeader header_of(const std::string& path, std::string_view text) {
  const auto fail = [&](const std::string& reason) {
    refuse_npy(path,
               "its header is not as NumPy writes it: " + reason + " (" + printable(text) + ")");
  };
  const Json json = json_of(text);
  if (!json.is_object()) fail("expected a dictionary");
  for (const char* key : {"descr", "fortran_order", "shape"})
    if (!json.contains(key)) fail(std::string(key) + " is missing");
  if (json.size() > 3) fail("it has other keys");
  const Json& order = json["fortran_order"];
  if (!order.is_boolean()) fail("fortran_order is neither True nor False");
  if (order.get<bool>())
    refuse_npy(path, "is in Fortran order, expected C order (numpy.ascontiguousarray)");
  NpyHeader header;
  header.type = type_of(path, json["descr"]);
  if (!json["shape"].is_array()) fail("its shape is no tuple");
  if (json["shape"].size() > kMostDimensions)
    fail("more than " + std::to_string(kMostDimensions) + " dimensions");
  for (const Json& size : json["shape"]) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() >> 63 != 0)
      fail("expected dimensions from 0 to 2^63 - 1");
    header.shape.push_back(size.get<int64_t>());
  }
  return header;
}

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
  NpyHeader header = header_of(path, bytes.substr(begin, length));
  header.data_begin = static_cast<int64_t>(begin + length);
  return header;
}

}  // namespace tessera
