#pragma once

#include <cstdint>
#include <string>
#include <vector>

#pragma GCC visibility push(default)
namespace tessera {

/// The entry of one tensor in a safetensors header.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< The format's name: "F32", "BF16", "I64", "BOOL", …
  std::vector<int64_t> shape;
  uint64_t begin = 0;  ///< Offset of the first byte from the start of the file's data.
  uint64_t end = 0;    ///< Offset behind the last byte.

  /// Number of elements; 1 for a shape without dimensions.
  int64_t numel() const;
};

}  // namespace tessera
#pragma GCC visibility pop
