// The functions of xxHash, once for the whole library. They take half the time with -O3.
#define XXH_STATIC_LINKING_ONLY
#define XXH_IMPLEMENTATION
#include <xxhash.h>
