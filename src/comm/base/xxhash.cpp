// The functions of xxHash, once for the whole library. They take half the time with -O3. Those that
// read data take half of that with AVX2, and have the same results.
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

#if defined(__x86_64__)
#undef XXH3_64bits
#undef XXH3_64bits_update
#undef XXH3_128bits
#undef XXH3_128bits_update
#define XXH3_64bits tessera_generic_64bits
#define XXH3_64bits_update tessera_generic_64bits_update
#define XXH3_128bits tessera_generic_128bits
#define XXH3_128bits_update tessera_generic_128bits_update
#endif
#define XXH_IMPLEMENTATION
#include <xxhash.h>

#if defined(__x86_64__)
#define TESSERA_CHOICE(name) \
  (__builtin_cpu_supports("avx2") ? tessera_avx2_XXH3_##name : tessera_generic_##name)
#define TESSERA_WHOLE(result, name)                                \
  result tessera_avx2_XXH3_##name(const void* data, size_t bytes); \
  result tessera_XXH3_##name(const void* data, size_t bytes) {     \
    return TESSERA_CHOICE(name)(data, bytes);                      \
  }
#define TESSERA_PART(name)                                                                     \
  XXH_errorcode tessera_avx2_XXH3_##name(XXH3_state_t* state, const void* data, size_t bytes); \
  XXH_errorcode tessera_XXH3_##name(XXH3_state_t* state, const void* data, size_t bytes) {     \
    return TESSERA_CHOICE(name)(state, data, bytes);                                           \
  }
extern "C" {
TESSERA_WHOLE(XXH64_hash_t, 64bits)
TESSERA_WHOLE(XXH128_hash_t, 128bits)
TESSERA_PART(64bits_update)
TESSERA_PART(128bits_update)
}
#endif
