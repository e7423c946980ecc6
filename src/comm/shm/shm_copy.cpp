#include <cstring>

#include "comm/shm/shm_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera::comm {
namespace {

// The results of smaller copies may still be in cache when they are used.
constexpr int64_t large_copy = 4 << 20;

#if defined(__x86_64__)
// Non-temporal stores bypass the caches and so avoid reading each line before it is overwritten.
// SSE2 suffices, and every x86-64 processor has it: the gain comes from whole lines, not from wide
// registers. `to` is aligned to 64 bytes, `bytes` is a multiple of 64.
void stream(std::byte* to, const std::byte* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(from + at) + 1024, _MM_HINT_T0);
    __m128i line[4];
    for (int k = 0; k < 4; ++k)
      line[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at) + k);
    for (int k = 0; k < 4; ++k) _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + k, line[k]);
  }
  _mm_sfence();
}
#endif

}  // namespace

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes <= 0) return;
#if defined(__x86_64__)
  if (bytes >= large_copy) {
    const auto head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & 63);
    const int64_t body = (bytes - head) / 64 * 64;
    std::memcpy(to, from, head);
    stream(to + head, from + head, body);
    std::memcpy(to + head + body, from + head + body, bytes - head - body);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace tessera::comm
