#!/usr/bin/env bash
# Builds and runs the tests with a label under sanitizers: run_sanitizers.sh [LABEL [PRESET]]. Default:
# quick, under the address and undefined sanitizers, then under the thread sanitizer. Only the programs
# of these tests are built. The test `lifetimes` runs under both as well, with a small quarantine, because
# it measures memory.
set -euo pipefail
cd "$(dirname "$0")/.."
label=${1:-quick}
for preset in ${2:-asan tsan}; do
  cmake --preset "$preset"
  programs=$(scripts/programs_of_label.sh "$label" "build-$preset")
  cmake --build --preset "$preset" -j "$(nproc)" --target $programs
  ctest --preset "$preset" -L "$label" -j $((2 * $(nproc)))
  cmake --build --preset "$preset" -j "$(nproc)" \
    --target lifetimes_probe tessera_cli tessera_train_cli failing_files
  ASAN_OPTIONS=detect_leaks=0:detect_container_overflow=0:verify_asan_link_order=0:quarantine_size_mb=1 \
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    TSAN_OPTIONS="suppressions=$PWD/cmake/tsan.supp:halt_on_error=1" \
    python3 tests/integration/lifetimes_test.py "build-$preset"
done
