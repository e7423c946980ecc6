#include <cstring>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "comm/shm/shm_sum.h"

#if defined(__x86_64__)
#include <immintrin.h>

// The headers above are compiled for the base processor, because other files share their functions.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

#include "comm/shm/shm_sum_kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace tessera::comm {

SumKernel avx2_sum_kernel(c10::ScalarType dtype) {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return has ? kernel_of(dtype) : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace tessera::comm
