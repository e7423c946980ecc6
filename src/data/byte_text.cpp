#include <glob.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "tessera/data.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse_text(const std::string& path, const std::string& reason) {
  throw UsageError("ByteText: " + path + ": " + reason);
}

bool counts(const fs::path& path) {
  std::error_code ignored;
  return fs::symlink_status(path, ignored).type() == fs::file_type::regular;
}

std::vector<std::string> of_folder(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> files;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (counts(it->path())) {
      files.push_back(it->path().string());
    }
  }
  if (error) {
    refuse_text(folder, "cannot be listed: " + error.message());
  }
  if (files.empty()) {
    refuse_text(folder, "the folder holds no regular file");
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<std::string> of_pattern(const std::string& pattern) {
  glob_t matches{};
  const int result = ::glob(pattern.c_str(), GLOB_NOSORT, nullptr, &matches);
  std::vector<std::string> files;
  for (size_t i = 0; result == 0 && i < matches.gl_pathc; ++i) {
    if (counts(matches.gl_pathv[i])) {
      files.emplace_back(matches.gl_pathv[i]);
    }
  }
  ::globfree(&matches);
  if (files.empty()) {
    refuse_text(pattern, "no such file, and as a pattern it matches no regular file");
  }
  // Byte order, not the locale's: the same text everywhere.
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<std::string> expand(const std::string& path) {
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  if (fs::is_directory(status)) {
    return of_folder(path);
  }
  if (fs::exists(status)) {
    if (!fs::is_regular_file(status)) {
      refuse_text(path, "is neither a file nor a folder");
    }
    return {path};
  }
  if (path.find_first_of("*?[") != std::string::npos) {
    return of_pattern(path);
  }
  refuse_text(path, "no such file or folder");
}

void append(std::string& text, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::error_code error;
  const auto size = fs::file_size(path, error);
  if (!file || error) {
    refuse_text(path, "cannot be read" + (error ? ": " + error.message() : std::string()));
  }
  const size_t before = text.size();
  text.resize(before + size);
  if (!file.read(text.data() + before, static_cast<std::streamsize>(size))) {
    refuse_text(path, "reading its " + std::to_string(size) + " bytes failed");
  }
}

}  // namespace

TokenData ByteText::load() const {
  if (!(val_fraction >= 0 && val_fraction < 1)) {
    throw UsageError("ByteText: val_fraction is " + std::to_string(val_fraction) + ", expected [0, 1)");
  }
  if (paths.empty()) {
    throw UsageError("ByteText: path: at least one file, folder or pattern is expected");
  }
  const auto text = std::make_shared<std::string>();
  std::string source;
  for (const std::string& path : paths) {
    source += (source.empty() ? "" : ", ") + path;
    for (const std::string& file : expand(path)) {
      append(*text, file);
    }
  }
  if (text->empty()) {
    refuse_text(source, "holds no bytes");
  }
  const auto size = static_cast<int64_t>(text->size());
  const Tokens all(text, text->data(), size, 1, "ByteText: " + source);
  const auto train = static_cast<int64_t>(static_cast<double>(size) * (1.0 - val_fraction));
  return {all.slice(0, train, all.source() + " (training part)"),
          all.slice(train, size - train, all.source() + " (evaluation part)")};
}

}  // namespace tessera
