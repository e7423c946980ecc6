#!/usr/bin/env bash
# Runs the tests of a build folder: run_tests.sh [BUILD_FOLDER [CTEST_OPTION…]]. Default: all of build.
set -euo pipefail
build=${1:-build}
# The environment may select an old BLAS kernel or a number of threads. The tests set what they need.
unset OPENBLAS_CORETYPE OMP_NUM_THREADS
# Three slots for each core, because most tests wait a part of their time. PROCESSORS of a test says
# how many it has.
exec ctest --test-dir "$build" -j $((3 * $(nproc))) --output-on-failure --no-tests=error "${@:2}"
