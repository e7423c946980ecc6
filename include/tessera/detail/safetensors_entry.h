#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// What a safetensors header says of one tensor. Offsets count bytes from the start of the file's
/// data part.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< as the format spells it: "F32", "BF16", "I64", "BOOL", …
  std::vector<int64_t> shape;
  uint64_t begin = 0;
  uint64_t end = 0;

  /// Number of elements; 1 for a shape without dimensions.
  int64_t numel() const;
};

}  // namespace tessera
