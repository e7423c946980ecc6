#pragma once

#include <cstdint>
#include <vector>

#include <torch/types.h>

namespace tessera::sharding {

/// Divides `order` (indices into `tensors`) into buckets of one dtype and device each. A bucket is
/// closed when it has reached its size: `first_bytes` for the first bucket of each dtype and
/// device, `cap_bytes` for the others. Buckets are ordered by their earliest member. Within a
/// bucket, tensors whose sizes would break libtorch's alignment of the next tensors come last.
std::vector<std::vector<size_t>> plan_buckets(const std::vector<at::Tensor>& tensors,
                                              const std::vector<size_t>& order, int64_t first_bytes,
                                              int64_t cap_bytes);

}  // namespace tessera::sharding
