#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace tessera {

struct MappedFile {
  std::shared_ptr<const uint8_t> data;  ///< null when the file is empty
  int64_t size = 0;
};

/// A regular file, mapped for reading for as long as `data` lives. Throws UsageError, `component:
/// path: reason`.
MappedFile map_file(const std::string& component, const std::string& path);

}  // namespace tessera
