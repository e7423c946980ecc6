#!/usr/bin/env bash
# Builds and runs the tests with a label under sanitizers: run_sanitizers.sh [LABEL [PRESET]]. Default:
# quick, under the address and undefined sanitizers, then under the thread sanitizer. Only the programs
# of these tests are built.
set -euo pipefail
cd "$(dirname "$0")/.."
label=${1:-quick}
for preset in ${2:-asan tsan}; do
  cmake --preset "$preset"
  programs=$(scripts/programs_of_label.sh "$label" "build-$preset")
  cmake --build --preset "$preset" -j "$(nproc)" --target $programs
  ctest --preset "$preset" -L "$label" -j $((2 * $(nproc)))
done
