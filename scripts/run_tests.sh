#!/usr/bin/env bash
# Runs all tests of a build folder; ends with ctest's summary.
set -euo pipefail
build=${1:-build}
# An environment may pin an old BLAS kernel or a thread count; the tests set what they need themselves.
unset OPENBLAS_CORETYPE OMP_NUM_THREADS
exec ctest --test-dir "$build" -j "$(nproc)" --output-on-failure --no-tests=error
