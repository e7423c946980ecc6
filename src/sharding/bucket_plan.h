#pragma once

#include <cstdint>
#include <vector>

#include <torch/torch.h>

namespace tessera::sharding {

/// Deals `order` (indices into `tensors`) into buckets of one dtype and device each: a bucket is
/// closed when it has reached its size, `first_bytes` for the first of each kind and `cap_bytes`
/// for the others. Buckets are ordered by their earliest member; within one, tensors whose sizes
/// would put the next ones out of libtorch's alignment come last.
std::vector<std::vector<size_t>> plan_buckets(const std::vector<at::Tensor>& tensors,
                                              const std::vector<size_t>& order, int64_t first_bytes,
                                              int64_t cap_bytes);

}  // namespace tessera::sharding
