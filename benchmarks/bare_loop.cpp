#include "bare_loop.h"

namespace tessera::benchmarks {

namespace {

[[gnu::always_inline]] inline void loop(float* __restrict p, const float* __restrict g,
                                        float* __restrict m, float* __restrict v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = p[i] + g[i], y = m[i] + g[i], z = v[i] + g[i];
    p[i] = x;
    m[i] = y;
    v[i] = z;
  }
}

void loop_any(float* p, const float* g, float* m, float* v, int64_t n) { loop(p, g, m, v, n); }

#if defined(__x86_64__)
[[gnu::target("avx2")]] void loop_avx2(float* p, const float* g, float* m, float* v, int64_t n) {
  loop(p, g, m, v, n);
}
#endif

}  // namespace

void bare_four_read_three_write(float* p, const float* g, float* m, float* v, int64_t n) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") != 0) return loop_avx2(p, g, m, v, n);
#endif
  loop_any(p, g, m, v, n);
}

}  // namespace tessera::benchmarks
