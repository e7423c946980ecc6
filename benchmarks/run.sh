#!/usr/bin/env bash
# Builds and runs all benchmarks. Prints tables and writes the figures to benchmark-out/*.json.
#   benchmarks/run.sh [BUILD [PYTHON…]]
# PYTHON: interpreters whose PyTorch Tessera is compared with; Debian's by default.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
shift || true
cmake --preset release -B "$build" -DTESSERA_BUILD_BENCHMARKS=ON >/dev/null
cmake --build "$build" -j "$(nproc)"
mkdir -p benchmark-out
unset OPENBLAS_CORETYPE
export OMP_NUM_THREADS=1
"$build/bin/bench_adam" --json benchmark-out/adam.json
"$build/bin/bench_collectives" --json benchmark-out/collectives.json
"benchmarks/hooks.py" --build "$build" --json benchmark-out/hooks.json
for python in "${@:-/usr/bin/python3}"; do
  version=$("$python" -c 'import torch; print(torch.__version__)')
  benchmarks/compare.py --build "$build" --python "$python" --json "benchmark-out/peers-$version.json"
  benchmarks/startup.py --build "$build" --python "$python" --json "benchmark-out/startup-$version.json"
done
benchmarks/memory.py --build "$build" --json benchmark-out/memory.json
