// Cases in which the fuzzer has found a fault, as it has shrunk them.

#include <gtest/gtest.h>

#include "fuzz/training/worker.h"

namespace tessera::fuzz {
namespace {

[[maybe_unused]] void expect_sound(const Case& which) {
  const auto finding = run_case(which);
  if (finding) ADD_FAILURE() << finding->kind << ": " << finding->text;
}

// [cases]

}  // namespace
}  // namespace tessera::fuzz
