#pragma once

#include "tessera/detail/range_update.h"

// The loops over elements, compiled for any CPU and for AVX2, and selected at run time. See
// [Note: bit identity] in tessera/optim/fused_optimizer.h.

namespace tessera::optim {

enum class Precision { Float32, Float64 };

/// Coefficients: 0 beta1, 1 1 - beta1, 2 beta2, 3 1 - beta2, 4 1 / sqrt(1 - beta2^step), 5 eps,
/// 6 lr / (1 - beta1^step), 7 factor on the parameter (decoupled decay; 1: none), 8 L2 decay.
RangeKernel adam_kernel(Precision precision, bool l2, bool amsgrad);

enum class Momentum { None, Plain, Nesterov };

/// Coefficients: 0 momentum, 1 1 - dampening, 2 lr, 3 L2 decay.
RangeKernel sgd_kernel(Precision precision, bool l2, Momentum momentum);

/// See tessera/optim/fused_optimizer.h.
double sum_of_squares(const float* x, int64_t n);

/// True if the AVX2 code is used.
bool uses_avx2();

/// For tests and measurements. False: kernels that are requested from now on use the code for any
/// CPU; true: the code selected at run time.
void allow_avx2(bool allowed);

}  // namespace tessera::optim
