#!/usr/bin/env bash
# Builds the asan and tsan presets and runs the fast tests under each.
set -euo pipefail
cd "$(dirname "$0")/.."
for preset in ${*:-asan tsan}; do
  cmake --preset "$preset"
  cmake --build --preset "$preset" -j "$(nproc)"
  ctest --preset "$preset" -j "$(nproc)"
done
