#!/usr/bin/env bash
# Builds and tests the same sources against the newest PyTorch wheel that PyPI offers, or the version given.
#
#     scripts/test_with_wheel.sh [VERSION]
#
# VENV=FOLDER   a virtual environment to use (made, with torch and numpy, unless it is there; one that has torch is left as it is and
#               needs no network). Default: in the build folder. About 6 GB: the wheel brings its CUDA libraries along.
# BUILD=FOLDER  the build folder, default build-wheel.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-}
build=${BUILD:-build-wheel}
venv=${VENV:-$build/venv}
start=$SECONDS

if [ ! -x "$venv/bin/python" ]; then
  python=$(command -v python3)
  if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "test_with_wheel: python3 lacks venv: apt-get install python3-venv" >&2
    exit 1
  fi
  "$python" -m venv "$venv"
fi
if [ -n "$version" ] || ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  "$venv/bin/pip" install --quiet "torch${version:+==$version}" numpy
fi
torch=$("$venv/bin/python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent)')
installed=$SECONDS

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_TORCH="$torch"
cmake --build "$build" -j "$(nproc)"
built=$SECONDS
scripts/run_tests.sh "$build"
echo "test_with_wheel: wheel $((installed - start)) s, build $((built - installed)) s, tests $((SECONDS - built)) s"
