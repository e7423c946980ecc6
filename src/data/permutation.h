#pragma once

#include <cstdint>

namespace tessera {

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection that mixes all 64 bits.
inline uint64_t mix_bits(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// The image of `index` under a permutation of [0, size) that `key` selects. The permutation is a
/// Feistel network over the next even number of bits, applied until the result is in [0, size)
/// (fewer than 4 times on average). It needs no memory, whatever the size.
inline uint64_t permuted_index(uint64_t index, uint64_t size, uint64_t key) {
  int half = 1;
  while (half < 32 && (uint64_t{1} << (2 * half)) < size) ++half;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  do {
    uint64_t left = index >> half, right = index & mask;
    for (uint64_t round = 0; round < 6; ++round) {
      const uint64_t next = left ^ (mix_bits(key ^ mix_bits(right ^ (round << 56))) & mask);
      left = right;
      right = next;
    }
    index = left << half | right;
  } while (index >= size);
  return index;
}

}  // namespace tessera
