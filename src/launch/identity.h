#pragma once

#include <cstdio>
#include <random>
#include <string>

#include <unistd.h>

namespace tessera::launch {

/// 16 random hexadecimal digits.
inline std::string random_id() {
  std::random_device source;
  char text[17];
  snprintf(text, sizeof text, "%08x%08x", source(), source());
  return text;
}

/// The name of this host.
inline std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown host";
}

}  // namespace tessera::launch
