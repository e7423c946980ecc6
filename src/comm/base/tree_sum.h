#pragma once

#include <bit>
#include <cstddef>

#include <ATen/ATen.h>

namespace tessera::comm {

/// Adds leaf(0) … leaf(count - 1) in the order of sums over ranks: a binary tree over blocks of 2^k
/// aligned ranks, as in ((x0 + x1) + (x2 + x3)) + x4. A host with an aligned block of ranks can
/// then add its part alone, with the same bits. `add(left, right)` returns left + right. `count` >
/// 0.
template <class Leaf, class Add>
auto add_in_tree(size_t count, const Leaf& leaf, const Add& add, size_t first = 0)
    -> decltype(leaf(first)) {
  if (count == 1) return leaf(first);
  const size_t left = std::bit_floor(count - 1);
  auto sum = add_in_tree(left, leaf, add, first);
  return add(std::move(sum), add_in_tree(count - left, leaf, add, first + left));
}

/// True if sums of `dtype` are taken in float and rounded when they are complete. Such a sum may be
/// out of range where the mean is not, so a factor must come before the rounding.
inline bool is_narrow(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

/// The sum of `parts` over its first dimension, one row for each rank, times `scale`. 16-bit floats
/// are summed and scaled in float and rounded once. Overwrites `parts`.
at::Tensor sum_rows(const at::Tensor& parts, double scale);

}  // namespace tessera::comm
