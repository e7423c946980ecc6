#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/error.h"

// The contract of Dataset::get about sample numbers.

namespace tessera {

inline void require_sample(const char* component, int64_t sample) {
  if (sample < 0) {
    throw UsageError(std::string(component) + ": sample " + std::to_string(sample) +
                     ", expected 0 or more");
  }
}

/// The rows that stand for `samples` in data that begins anew after `size`.
inline std::vector<int64_t> wrapped(const char* component, const std::vector<int64_t>& samples,
                                    int64_t size) {
  std::vector<int64_t> rows;
  rows.reserve(samples.size());
  for (const int64_t sample : samples) {
    require_sample(component, sample);
    rows.push_back(sample % size);
  }
  return rows;
}

}  // namespace tessera
