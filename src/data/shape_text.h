#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// "60000 x 28 x 28", for messages.
inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return text;
}

}  // namespace tessera
