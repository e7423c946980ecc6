#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include <ATen/ATen.h>

namespace tessera::comm {

using Counts = std::vector<int64_t>;

inline std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

/// `numel` elements in `size` parts. The first ones may have one element more.
inline Counts even_counts(int64_t numel, int size) {
  Counts counts(size, numel / size);
  for (int r = 0; r < numel % size; ++r) ++counts[r];
  return counts;
}

/// The sum of the entries before each one: where segments of these lengths begin.
inline Counts segment_starts(const Counts& counts) {
  Counts starts(counts.size(), 0);
  std::exclusive_scan(counts.begin(), counts.end(), starts.begin(), int64_t{0});
  return starts;
}

inline at::Tensor segment_of(const at::Tensor& flat, const Counts& counts, int rank) {
  return flat.narrow(0, segment_starts(counts)[rank], counts[rank]);
}

/// The consecutive segments of a flat tensor. They are used window by window: window i of a segment
/// has its elements from i * step on, at most `step`.
struct Segments {
  Segments(const at::Tensor& tensor, const Counts& lengths, int64_t elements)
      : flat(tensor),
        counts(lengths),
        starts(segment_starts(lengths)),
        width(static_cast<int64_t>(tensor.element_size())),
        step(elements),
        windows((*std::max_element(counts.begin(), counts.end()) + step - 1) / step) {}

  int size() const { return static_cast<int>(counts.size()); }
  at::Tensor operator[](int segment) const {
    return flat.narrow(0, starts[segment], counts[segment]);
  }
  /// Elements of a window.
  int64_t count(int segment, int64_t window) const {
    return std::clamp<int64_t>(counts[segment] - window * step, 0, step);
  }
  /// Bytes of `flat` before a window.
  int64_t offset(int segment, int64_t window) const {
    return (starts[segment] + window * step) * width;
  }
  at::Tensor window(int segment, int64_t number) const {
    return flat.narrow(0, starts[segment] + number * step, count(segment, number));
  }

  at::Tensor flat;
  Counts counts, starts;
  int64_t width;  ///< Bytes of an element.
  int64_t step;
  int64_t windows;  ///< Of the longest segment.
};

}  // namespace tessera::comm
