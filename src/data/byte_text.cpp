#include <filesystem>
#include <fstream>
#include <string>

#include "data/expand_paths.h"
#include "tessera/data/token_source.h"
#include "tessera/error.h"

namespace tessera {
namespace {

[[noreturn]] void refuse_text(const std::string& path, const std::string& reason) {
  throw UsageError("ByteText: " + path + ": " + reason);
}

void append(std::string& text, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (!file || error)
    refuse_text(path, "cannot be read" + (error ? ": " + error.message() : std::string()));
  const size_t before = text.size();
  text.resize(before + size);
  if (!file.read(text.data() + before, static_cast<std::streamsize>(size)))
    refuse_text(path, "reading its " + std::to_string(size) + " bytes failed");
}

}  // namespace

TokenData ByteText::load() const {
  if (!(val_fraction >= 0 && val_fraction < 1)) {
    throw UsageError("ByteText: val_fraction is " + std::to_string(val_fraction) +
                     ", expected [0, 1)");
  }
  const auto text = std::make_shared<std::string>();
  for (const std::string& file : expand_paths("ByteText", "path", paths)) append(*text, file);
  if (text->empty()) refuse_text(listed(paths), "holds no bytes");
  const auto size = static_cast<int64_t>(text->size());
  const Tokens all(text, text->data(), size, 1, "ByteText: " + listed(paths));
  const auto train = static_cast<int64_t>(static_cast<double>(size) * (1.0 - val_fraction));
  return {all.slice(0, train, all.source() + " (training part)"),
          all.slice(train, size - train, all.source() + " (evaluation part)")};
}

}  // namespace tessera
