#pragma once

#include <cstddef>
#include <cstdint>

#include <c10/core/ScalarType.h>

namespace tessera::comm {

/// The arguments of one sum over ranks; see sum_ranks() in shm_kernels.h.
struct SumRun {
  std::byte* const* outputs;
  size_t output_count;
  const std::byte* const* inputs;
  size_t input_count;
  int64_t count;
  double scale;  ///< For floating-point dtypes; must be 1 for other dtypes.
};

using SumKernel = void (*)(const SumRun&);

/// Returns null for a dtype that has no kernel.
SumKernel generic_sum_kernel(c10::ScalarType dtype);
/// As generic_sum_kernel(), for processors with AVX2 and F16C; null on other processors.
SumKernel avx2_sum_kernel(c10::ScalarType dtype);

}  // namespace tessera::comm
