#pragma once

#include <cstddef>
#include <cstdint>

#include <c10/core/ScalarType.h>

namespace tessera::comm {

/// One sum over ranks, see sum_ranks() in shm_kernels.h.
struct SumRun {
  std::byte* const* outputs;
  size_t output_count;
  const std::byte* const* inputs;
  size_t input_count;
  int64_t count;
  double scale;  ///< Heeded for float32 and float64; must be 1 for others.
};

/// Null for a dtype that has no kernel.
using SumKernel = void (*)(const SumRun&);

SumKernel generic_sum_kernel(c10::ScalarType dtype);
/// For processors with AVX2 and F16C; null elsewhere.
SumKernel avx2_sum_kernel(c10::ScalarType dtype);

}  // namespace tessera::comm
