// The functions of xxHash for processors with AVX2. xxhash.cpp calls those that read data.
#if defined(__x86_64__)
#include <cstdlib>
#include <cstring>

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#undef XXH_NAMESPACE
#define XXH_NAMESPACE tessera_avx2_
#define XXH_VECTOR XXH_AVX2
#define XXH_STATIC_LINKING_ONLY
#define XXH_IMPLEMENTATION
#include <xxhash.h>

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
