#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace tessera::testing {

inline constexpr int64_t kMiB = 1 << 20;

/// A line of /proc/self/status in bytes.
inline int64_t status_bytes(const std::string& key) {
  std::ifstream file("/proc/self/status");
  std::string word;
  while (file >> word) {
    if (word != key + ":") continue;
    int64_t kilobytes = 0;
    file >> kilobytes;
    return kilobytes << 10;
  }
  return 0;
}

inline int64_t resident_bytes() { return status_bytes("VmRSS"); }
/// The most that resident_bytes() has been since reset_peak().
inline int64_t peak_bytes() { return status_bytes("VmHWM"); }
inline void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

}  // namespace tessera::testing
