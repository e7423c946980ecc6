#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace tessera {

struct MappedFile {
  std::shared_ptr<const uint8_t> data;  ///< Null for an empty file.
  int64_t size = 0;
};

/// Maps a regular file for reading. It stays mapped while `data` is alive. Throws UsageError
/// "component: path: reason".
MappedFile map_file(const std::string& component, const std::string& path);

}  // namespace tessera
