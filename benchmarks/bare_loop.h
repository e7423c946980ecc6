#pragma once

#include <cstdint>

namespace tessera::benchmarks {

/// The memory traffic of Adam and next to no arithmetic: reads four arrays and writes three, eight
/// floats at a time where the CPU can.
void bare_four_read_three_write(float* p, const float* g, float* m, float* v, int64_t n);

}  // namespace tessera::benchmarks
