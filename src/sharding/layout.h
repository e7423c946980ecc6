#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/optim/partition.h"

namespace tessera::sharding {

/// Consecutive elements of one tensor that one rank holds.
struct LayoutSlice {
  size_t tensor;   ///< Index into the sizes that the layout was made from.
  int64_t begin;   ///< First element, in the tensor.
  int64_t numel;   ///< Number of elements, > 0.
  int64_t offset;  ///< First element, in the flat buffer.
  bool operator==(const LayoutSlice&) const = default;
};

/// Maps slices of tensors to places in a flat buffer that is cut into one segment a rank. Segments
/// follow each other in rank order without gaps, and each tensor is one contiguous part of the
/// buffer. Pure numbers.
class Layout {
 public:
  Layout() = default;
  /// Tensors in order; segments of ceil(total / world) elements, the last segments shorter or
  /// empty.
  static Layout flat(std::vector<int64_t> sizes, int world);
  /// Whole tensors: segment r holds the tensors with owner r, in order.
  static Layout owned(std::vector<int64_t> sizes, const std::vector<int>& owners, int world);

  int world() const { return static_cast<int>(counts_.size()); }
  int64_t numel() const { return begins_.empty() ? 0 : begins_.back(); }
  size_t tensors() const { return sizes_.size(); }
  /// Elements of each rank's segment.
  const std::vector<int64_t>& counts() const { return counts_; }
  int64_t segment_begin(int rank) const { return begins_[rank]; }
  int64_t size(size_t tensor) const { return sizes_[tensor]; }
  int64_t offset(size_t tensor) const { return offsets_[tensor]; }
  /// The slices that `rank` holds, by ascending offset. They cover its segment exactly.
  std::vector<LayoutSlice> slices(int rank) const;

 private:
  void cut(std::vector<int64_t> counts);

  std::vector<int64_t> sizes_, offsets_, counts_;
  std::vector<int64_t> begins_;   // offsets of the segments, and the end of the last
  std::vector<size_t> in_order_;  // tensors by ascending offset
};

}  // namespace tessera::sharding
