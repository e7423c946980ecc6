#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/error.h"

// Sample numbers as the argument of Dataset::get().

namespace tessera {

/// Throws UsageError if `sample` is negative.
inline void require_sample_number(const char* component, int64_t sample) {
  if (sample < 0) {
    throw UsageError(std::string(component) + ": sample " + std::to_string(sample) +
                     ", expected 0 or more");
  }
}

/// The row of each of `samples`, for a dataset of `size` rows that starts from the beginning after
/// its last row. Throws UsageError for a negative number.
inline std::vector<int64_t> rows_of_samples(const char* component,
                                            const std::vector<int64_t>& samples, int64_t size) {
  std::vector<int64_t> rows;
  rows.reserve(samples.size());
  for (const int64_t sample : samples) {
    require_sample_number(component, sample);
    rows.push_back(sample % size);
  }
  return rows;
}

}  // namespace tessera
