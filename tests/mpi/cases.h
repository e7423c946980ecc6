#pragma once

#include <string>

#include "tessera/process_group.h"

// What the program of mpi_test.py checks in a group. Throws std::runtime_error.

namespace tessera::testing {

void expect(bool condition, const std::string& what);

/// Sums, gathers, scattered sums and texts have the right values.
void expect_sums(ProcessGroup group);

/// Each wrapper trains as plain libtorch does on the samples of all ranks.
void expect_parity(ProcessGroup group);

}  // namespace tessera::testing
