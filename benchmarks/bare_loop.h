#pragma once

#include <cstdint>

namespace tessera::benchmarks {

/// A loop with the memory traffic of Adam and almost no arithmetic. It reads four arrays of `n`
/// floats and writes three, with AVX2 (eight floats at a time) where the CPU has it.
void bare_four_read_three_write(float* p, const float* g, float* m, float* v, int64_t n);

}  // namespace tessera::benchmarks
