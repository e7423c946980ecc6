#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tessera/detail/range_update.h"

// Included only by kernels.cpp. The loops are inlined into one function per instruction set, so
// that the compiler vectorises them for it.

#define TESSERA_INLINE [[gnu::always_inline]] inline

namespace tessera::optim {

template <class T, bool L2, bool Amsgrad, bool Copy>
TESSERA_INLINE void adam_loop(const RangeUpdate& u, int64_t offset, const T* __restrict grad,
                              int64_t n, T scale, T* __restrict copy_out) {
  const double* c = u.coefficients;
  const T beta1 = static_cast<T>(c[0]), keep1 = static_cast<T>(c[1]);
  const T beta2 = static_cast<T>(c[2]), keep2 = static_cast<T>(c[3]);
  const T correction = static_cast<T>(c[4]), eps = static_cast<T>(c[5]),
          step = static_cast<T>(c[6]);
  const T shrink = static_cast<T>(c[7]), l2 = static_cast<T>(c[8]);
  T* __restrict parameter = static_cast<T*>(u.parameter) + offset;
  T* __restrict first = static_cast<T*>(u.first) + offset;
  T* __restrict second = static_cast<T*>(u.second) + offset;
  T* __restrict maximum = Amsgrad ? static_cast<T*>(u.maximum) + offset : nullptr;
  for (int64_t i = 0; i < n; ++i) {
    T p = parameter[i];
    T g = grad[i] * scale;
    if constexpr (L2) g = g + l2 * p;
    p = p * shrink;
    const T m = first[i] * beta1 + keep1 * g;
    const T v = second[i] * beta2 + keep2 * g * g;
    first[i] = m;
    second[i] = v;
    T spread = v;
    if constexpr (Amsgrad) {
      const T before = maximum[i];
      spread = v > before || v != v ? v : before;
      maximum[i] = spread;
    }
    p = p - (step * m) / (std::sqrt(spread) * correction + eps);
    parameter[i] = p;
    if constexpr (Copy) copy_out[i] = p;
  }
}

template <class T, bool L2, bool HasMomentum, bool Nesterov, bool Copy>
TESSERA_INLINE void sgd_loop(const RangeUpdate& u, int64_t offset, const T* __restrict grad,
                             int64_t n, T scale, T* __restrict copy_out) {
  const double* c = u.coefficients;
  const T momentum = static_cast<T>(c[0]), keep = static_cast<T>(c[1]);
  const T lr = static_cast<T>(c[2]), l2 = static_cast<T>(c[3]);
  T* __restrict parameter = static_cast<T*>(u.parameter) + offset;
  T* __restrict buffer = HasMomentum ? static_cast<T*>(u.first) + offset : nullptr;
  for (int64_t i = 0; i < n; ++i) {
    T p = parameter[i];
    T g = grad[i] * scale;
    if constexpr (L2) g = g + l2 * p;
    if constexpr (HasMomentum) {
      const T b = buffer[i] * momentum + keep * g;
      buffer[i] = b;
      g = Nesterov ? g + momentum * b : b;
    }
    p = p - lr * g;
    parameter[i] = p;
    if constexpr (Copy) copy_out[i] = p;
  }
}

template <class T, bool L2, bool Amsgrad>
TESSERA_INLINE void adam_range(const RangeUpdate& u, int64_t offset, const void* grad, int64_t n,
                               double scale, void* copy_out) {
  if (copy_out != nullptr) {
    adam_loop<T, L2, Amsgrad, true>(u, offset, static_cast<const T*>(grad), n,
                                    static_cast<T>(scale), static_cast<T*>(copy_out));
  } else {
    adam_loop<T, L2, Amsgrad, false>(u, offset, static_cast<const T*>(grad), n,
                                     static_cast<T>(scale), nullptr);
  }
}

template <class T, bool L2, bool HasMomentum, bool Nesterov>
TESSERA_INLINE void sgd_range(const RangeUpdate& u, int64_t offset, const void* grad, int64_t n,
                              double scale, void* copy_out) {
  if (copy_out != nullptr) {
    sgd_loop<T, L2, HasMomentum, Nesterov, true>(u, offset, static_cast<const T*>(grad), n,
                                                 static_cast<T>(scale), static_cast<T*>(copy_out));
  } else {
    sgd_loop<T, L2, HasMomentum, Nesterov, false>(u, offset, static_cast<const T*>(grad), n,
                                                  static_cast<T>(scale), nullptr);
  }
}

// Sixteen running sums for any register width: element i is added to sum i mod 16.
TESSERA_INLINE double sum_of_squares_loop(const float* x, int64_t n) {
  using Floats = float __attribute__((vector_size(16)));
  using Doubles = double __attribute__((vector_size(32)));
  Doubles sums[4] = {};
  const auto add = [&sums](const float* block) __attribute__((always_inline)) {
    for (int k = 0; k < 4; ++k) {
      Floats values;
      std::memcpy(&values, block + 4 * k, sizeof(values));
      const Doubles wide = __builtin_convertvector(values, Doubles);
      sums[k] += wide * wide;
    }
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) add(x + i);
  if (i < n) {
    float tail[16] = {};
    std::memcpy(tail, x + i, static_cast<size_t>(n - i) * sizeof(float));
    add(tail);
  }
  const Doubles total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return (total[0] + total[1]) + (total[2] + total[3]);
}

}  // namespace tessera::optim
