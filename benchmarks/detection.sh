#!/usr/bin/env bash
# Counts the instructions of a step under callgrind, plain and with the detection of the use of
# parameters, and prints the ratio.
#   benchmarks/detection.sh [BUILD]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
unset OPENBLAS_CORETYPE
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
count() {
  valgrind --tool=callgrind --callgrind-out-file=/dev/null "$build/bin/bench_detection" "$@" 2>&1 | sed -n 's/.*Collected : //p'
}
printf '%-6s %-16s %18s %8s\n' model detection instructions ratio
for model in mlp gpt; do
  few=2 many=$([ "$model" = mlp ] && echo 2002 || echo 4)
  plain=0
  for mode in plain sharded; do
    a=$(count "$mode" "$model" "$few")
    b=$(count "$mode" "$model" "$many")
    each=$(((b - a) / (many - few)))
    [ "$mode" = plain ] && plain=$each
    printf '%-6s %-16s %18s %8s\n' "$model" "$mode" "$each" "$(awk "BEGIN { printf \"%.4f\", $each / $plain }")"
  done
done
