#!/usr/bin/env bash
# Runs the tests of a build folder: run_tests.sh [BUILD_FOLDER [CTEST_OPTION…]]. Default: all of build.
set -euo pipefail
build=${1:-build}
# The environment may select an old BLAS kernel or a number of threads. The tests set what they need.
unset OPENBLAS_CORETYPE OMP_NUM_THREADS
exec ctest --test-dir "$build" -j "$(nproc)" --output-on-failure --no-tests=error "${@:2}"
