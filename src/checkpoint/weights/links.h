#pragma once

#include <filesystem>
#include <system_error>

namespace tessera {

/// The target of a link at `file`, if it is outside the folder of `file`. Empty otherwise, and if
/// there is no target. In Hugging Face's cache the files of models--NAME/snapshots/COMMIT are links
/// to those of models--NAME/blobs, which count as being in the folder.
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
