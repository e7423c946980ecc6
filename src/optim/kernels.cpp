#include "optim/kernels.h"

#include <atomic>

#include "optim/kernel_loops.h"

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define TESSERA_AVX2 [[gnu::target("avx2")]]
#endif

namespace tessera::optim {

namespace {

#ifdef TESSERA_AVX2
bool cpu_has_avx2() { return __builtin_cpu_supports("avx2") != 0; }
#else
#define TESSERA_AVX2
bool cpu_has_avx2() { return false; }
#endif

std::atomic<bool> avx2_allowed{true};

template <class T, bool L2, bool Amsgrad>
void adam_any(const RangeUpdate& u, int64_t offset, const void* grad, int64_t n, double scale,
              void* copy_out) {
  adam_range<T, L2, Amsgrad>(u, offset, grad, n, scale, copy_out);
}

template <class T, bool L2, bool Amsgrad>
TESSERA_AVX2 void adam_avx2(const RangeUpdate& u, int64_t offset, const void* grad, int64_t n,
                            double scale, void* copy_out) {
  adam_range<T, L2, Amsgrad>(u, offset, grad, n, scale, copy_out);
}

template <class T, bool L2, bool HasMomentum, bool Nesterov>
void sgd_any(const RangeUpdate& u, int64_t offset, const void* grad, int64_t n, double scale,
             void* copy_out) {
  sgd_range<T, L2, HasMomentum, Nesterov>(u, offset, grad, n, scale, copy_out);
}

template <class T, bool L2, bool HasMomentum, bool Nesterov>
TESSERA_AVX2 void sgd_avx2(const RangeUpdate& u, int64_t offset, const void* grad, int64_t n,
                           double scale, void* copy_out) {
  sgd_range<T, L2, HasMomentum, Nesterov>(u, offset, grad, n, scale, copy_out);
}

template <class T, bool L2, bool Amsgrad>
RangeKernel pick_adam() {
  return uses_avx2() ? adam_avx2<T, L2, Amsgrad> : adam_any<T, L2, Amsgrad>;
}

template <class T>
RangeKernel pick_adam(bool l2, bool amsgrad) {
  if (l2) return amsgrad ? pick_adam<T, true, true>() : pick_adam<T, true, false>();
  return amsgrad ? pick_adam<T, false, true>() : pick_adam<T, false, false>();
}

template <class T, bool L2, bool HasMomentum, bool Nesterov>
RangeKernel pick_sgd() {
  return uses_avx2() ? sgd_avx2<T, L2, HasMomentum, Nesterov>
                     : sgd_any<T, L2, HasMomentum, Nesterov>;
}

template <class T, bool L2>
RangeKernel pick_sgd(Momentum momentum) {
  switch (momentum) {
    case Momentum::None:
      return pick_sgd<T, L2, false, false>();
    case Momentum::Plain:
      return pick_sgd<T, L2, true, false>();
    case Momentum::Nesterov:
      break;
  }
  return pick_sgd<T, L2, true, true>();
}

double sum_any(const float* x, int64_t n) { return sum_of_squares_loop(x, n); }

TESSERA_AVX2 double sum_avx2(const float* x, int64_t n) { return sum_of_squares_loop(x, n); }

}  // namespace

bool uses_avx2() {
  static const bool supported = cpu_has_avx2();
  return supported && avx2_allowed.load(std::memory_order_relaxed);
}

void allow_avx2(bool allowed) { avx2_allowed.store(allowed, std::memory_order_relaxed); }

RangeKernel adam_kernel(Precision precision, bool l2, bool amsgrad) {
  return precision == Precision::Float32 ? pick_adam<float>(l2, amsgrad)
                                         : pick_adam<double>(l2, amsgrad);
}

RangeKernel sgd_kernel(Precision precision, bool l2, Momentum momentum) {
  if (precision == Precision::Float32)
    return l2 ? pick_sgd<float, true>(momentum) : pick_sgd<float, false>(momentum);
  return l2 ? pick_sgd<double, true>(momentum) : pick_sgd<double, false>(momentum);
}

double sum_of_squares(const float* x, int64_t n) {
  return uses_avx2() ? sum_avx2(x, n) : sum_any(x, n);
}

}  // namespace tessera::optim
