#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include <malloc.h>

namespace tessera::testing {

inline constexpr int64_t kMiB = 1 << 20;

/// From now on malloc returns each block of at least 64 KiB to the system when it is freed, as it
/// must for a test of memory: what it keeps otherwise differs between runs. To be called before the
/// first large block is allocated, so as the initial value of a variable of the test's file.
inline bool return_freed_blocks() {
  return ::mallopt(M_MMAP_THRESHOLD, 64 << 10) == 1 && ::mallopt(M_MMAP_MAX, 1 << 16) == 1;
}

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

/// Resident memory, of which pages that several processes map count in equal parts. Without those
/// of files: the system drops and reads pages of libraries as it likes.
inline int64_t proportional_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  int64_t total = 0;
  while (file >> word) {
    int64_t kilobytes = 0;
    if ((word == "Pss_Anon:" || word == "Pss_Shmem:") && file >> kilobytes)
      total += kilobytes << 10;
  }
  return total;
}

}  // namespace tessera::testing
