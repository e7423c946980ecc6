#pragma once

#include <filesystem>
#include <system_error>

namespace tessera {

/// Where a link at `file` leads to, if that is not in the folder of `file`. Otherwise, and if it
/// leads nowhere, empty. In Hugging Face's cache the files of models--NAME/snapshots/COMMIT are
/// links to those of models--NAME/blobs, which count as being in the folder.
inline std::filesystem::path link_outside(const std::filesystem::path& file) {
  std::error_code error;
  if (!std::filesystem::is_symlink(file, error)) return {};
  const auto target = std::filesystem::canonical(file, error);
  if (error) return {};
  const auto folder = std::filesystem::canonical(file.has_parent_path() ? file.parent_path() : ".");
  const auto above = folder.parent_path();
  const bool cached =
      above.filename() == "snapshots" && target.parent_path() == above.parent_path() / "blobs";
  const bool inside = *target.lexically_relative(folder).begin() != "..";
  return cached || inside ? std::filesystem::path() : target;
}

}  // namespace tessera
