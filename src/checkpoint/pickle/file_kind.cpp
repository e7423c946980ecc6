#include "checkpoint/pickle/file_kind.h"

namespace tessera {
namespace {

using namespace std::string_view_literals;

struct Magic {
  std::string_view bytes;
  const char* text;
};

constexpr const char* kConvert = "load it with Python and save a state dict with torch.save";

// The first number that torch.save wrote before PyTorch 1.6, after the pickle's protocol.
constexpr auto kLegacy = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"sv;

const Magic kForeign[] = {
    {"\x93NUMPY"sv, "is an array of NumPy; expected weights, which have names"},
    {"\x89HDF"sv, "is an HDF5 file, as Keras writes it; h5py reads it"},
    {"GGUF"sv, "is a GGUF file of llama.cpp; convert it to safetensors with llama.cpp's tools"},
    {"version https://git-lfs"sv,
     "is a pointer of Git LFS and has no weights; git lfs pull gets them"},
    {"\x1f\x8b"sv, "is compressed with gzip; gunzip makes a file of it that can be read"},
    {"<"sv, "is an HTML or XML page; a download may have failed"},
    {"\x28\xb5\x2f\xfd"sv, "is compressed with zstd; unzstd makes a file of it that can be read"},
    {"\x7f"
     "ELF"sv,
     "is a program"},
};

}  // namespace

std::string foreign_kind(std::string_view begin) {
  if (begin.size() > 1 && begin[0] == '\x80' && begin[1] >= 2 && begin[1] <= 5)
    return std::string("is a plain pickle of Python; ") + kConvert;
  for (const auto& magic : kForeign)
    if (begin.starts_with(magic.bytes)) return magic.text;
  // A safetensors file that was cut off may end before its header.
  if (begin.size() > 8 && begin[8] != '{')
    return "is of an unknown kind; expected a safetensors file, a file of torch.save, or an index";
  return "";
}

bool is_tar(std::string_view begin) {
  constexpr size_t kMagic = 257;
  return begin.size() > kMagic && begin.substr(kMagic).starts_with("ustar"sv);
}

FileKind file_kind(std::string_view begin) {
  if (begin.starts_with("PK\x03\x04"sv) || begin.starts_with("PK\x05\x06"sv)) return FileKind::zip;
  constexpr size_t kPrologue = 32;  // protocol and frame
  if (begin.starts_with("\x80"sv) && begin.substr(0, kPrologue).find(kLegacy) != begin.npos)
    return FileKind::legacy;
  if (is_tar(begin)) return FileKind::legacy;
  // A safetensors file whose header has 0x…7b bytes begins with the same byte as JSON.
  const bool header = begin.size() > 8 && begin[8] == '{' && begin[7] == '\0';
  if (header) return FileKind::safetensors;
  const size_t text = begin.find_first_not_of(" \t\r\n");
  if (text != begin.npos && begin[text] == '{') return FileKind::json;
  return foreign_kind(begin).empty() ? FileKind::safetensors : FileKind::foreign;
}

}  // namespace tessera
