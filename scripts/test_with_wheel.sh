#!/usr/bin/env bash
# Builds and tests the same sources against the newest PyTorch wheel that PyPI offers (or the version given), in build-wheel/.
# Takes about 6 GB of disk: the wheel brings its CUDA libraries along.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-}
build=build-wheel

python=$(command -v python3)
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  echo "test_with_wheel: python3 lacks venv: apt-get install python3-venv" >&2
  exit 1
fi
[ -x "$build/venv/bin/python" ] || "$python" -m venv "$build/venv"
"$build/venv/bin/pip" install --quiet "torch${version:+==$version}" numpy
torch=$("$build/venv/bin/python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent)')

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_TORCH="$torch"
cmake --build "$build" -j "$(nproc)"
scripts/run_tests.sh "$build"
