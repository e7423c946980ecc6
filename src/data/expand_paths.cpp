#include "data/expand_paths.h"

#include <algorithm>
#include <filesystem>

#include <glob.h>

#include "tessera/detail/folders.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class Expansion {
 public:
  explicit Expansion(const std::string& component) : component_(component) {}

  void add(const std::string& path) {
    std::error_code ignored;
    const fs::file_status status = fs::status(path, ignored);
    if (fs::is_directory(status)) {
      add_folder(path);
    } else if (fs::exists(status)) {
      if (!fs::is_regular_file(status)) refuse(path, "is neither a file nor a folder");
      files_.push_back(path);
    } else if (path.find_first_of("*?[") != std::string::npos) {
      add_pattern(path);
    } else {
      refuse(path, "no such file or folder");
    }
  }

  std::vector<std::string> take() { return std::move(files_); }

 private:
  [[noreturn]] void refuse(const std::string& path, const std::string& reason) const {
    throw UsageError(component_ + ": " + path + ": " + reason);
  }

  static bool is_regular_file(const fs::path& path) {
    std::error_code ignored;
    return fs::symlink_status(path, ignored).type() == fs::file_type::regular;
  }

  void add_sorted(std::vector<std::string> found) {
    // By bytes and not by the locale, so that the data are the same on every machine.
    std::sort(found.begin(), found.end());
    files_.insert(files_.end(), found.begin(), found.end());
  }

  void add_folder(const std::string& folder) {
    std::error_code error;
    std::vector<std::string> found;
    for (const auto& name : detail::names_in(folder, error))
      if (is_regular_file(fs::path(folder) / name))
        found.push_back((fs::path(folder) / name).string());
    if (error) refuse(folder, "cannot be listed: " + error.message());
    if (found.empty()) refuse(folder, "the folder holds no regular file");
    add_sorted(std::move(found));
  }

  void add_pattern(const std::string& pattern) {
    glob_t matches{};
    const int result = ::glob(pattern.c_str(), GLOB_NOSORT, nullptr, &matches);
    std::vector<std::string> found;
    for (size_t i = 0; result == 0 && i < matches.gl_pathc; ++i)
      if (is_regular_file(matches.gl_pathv[i])) found.emplace_back(matches.gl_pathv[i]);
    ::globfree(&matches);
    if (found.empty()) refuse(pattern, "no such file, and as a pattern it matches no regular file");
    add_sorted(std::move(found));
  }

  std::string component_;
  std::vector<std::string> files_;
};

}  // namespace

std::vector<std::string> expand_paths(const std::string& component, const std::string& option,
                                      const std::vector<std::string>& paths) {
  if (paths.empty()) {
    throw UsageError(component + ": " + option +
                     ": at least one file, folder or pattern is expected");
  }
  Expansion expansion(component);
  for (const std::string& path : paths) expansion.add(path);
  return expansion.take();
}

std::string listed(const std::vector<std::string>& paths) {
  std::string text;
  for (const std::string& path : paths) text += (text.empty() ? "" : ", ") + path;
  return text;
}

}  // namespace tessera
