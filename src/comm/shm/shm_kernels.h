#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <c10/core/ScalarType.h>

namespace tessera::comm {

/// outputs[j][i] = scale * (inputs[0][i] + inputs[1][i] + …) for 0 <= i < count and every j, in one
/// pass. The order of the additions is that of base/tree_sum.h. 16-bit floats are summed and
/// scaled in float and rounded once. An output may be one of the inputs; otherwise
/// the arrays must not overlap.
void sum_ranks(c10::ScalarType dtype, const std::vector<std::byte*>& outputs,
               const std::vector<const std::byte*>& inputs, int64_t count, double scale = 1);

/// As memcpy, but large copies bypass the caches.
void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes);

}  // namespace tessera::comm
