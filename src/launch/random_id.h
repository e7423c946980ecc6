#pragma once

#include <cstdio>
#include <random>
#include <string>

namespace tessera::launch {

/// 16 random hexadecimal digits.
inline std::string random_id() {
  std::random_device source;
  char text[17];
  snprintf(text, sizeof text, "%08x%08x", source(), source());
  return text;
}

}  // namespace tessera::launch
