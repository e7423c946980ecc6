#pragma once

#include "tessera/detail/range_update.h"

// The loops over elements, compiled once for any CPU and once for AVX2, chosen at run time. See
// [Note: bit identity] in tessera/fused_optimizer.h.

namespace tessera::optim {

enum class Precision { Float32, Float64 };

/// Coefficients: 0 beta1, 1 1 - beta1, 2 beta2, 3 1 - beta2, 4 1 / sqrt(1 - beta2^step), 5 eps,
/// 6 lr / (1 - beta1^step), 7 factor on the parameter (decoupled decay; 1: none), 8 L2 decay.
RangeKernel adam_kernel(Precision precision, bool l2, bool amsgrad);

enum class Momentum { None, Plain, Nesterov };

/// Coefficients: 0 momentum, 1 1 - dampening, 2 lr, 3 L2 decay.
RangeKernel sgd_kernel(Precision precision, bool l2, Momentum momentum);

/// See fused_optimizer.h.
double sum_of_squares(const float* x, int64_t n);

/// Whether the AVX2 code is in use.
bool uses_avx2();

/// For tests and measurements: lets kernels asked for from now on be the code for any CPU (false),
/// or the chosen (true).
void allow_avx2(bool allowed);

}  // namespace tessera::optim
