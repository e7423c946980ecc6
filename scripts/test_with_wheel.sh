#!/usr/bin/env bash
# Builds and tests the sources against a PyTorch wheel: the newest one on PyPI, or VERSION.
#
#     scripts/test_with_wheel.sh [VERSION]
#
# VENV=FOLDER   the virtual environment to use. It is created, with torch and numpy, if it does not
#               exist. An environment that has torch is not changed and needs no network. Default: in
#               the build folder. Takes about 6 GB, because the wheel contains its CUDA libraries.
# BUILD=FOLDER  the build folder. Default: build-wheel.
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

# The test of Debian 13 does not depend on the wheel: `make test` runs it.
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_TORCH="$torch" \
  -DTESSERA_TEST_DEBIAN_13=OFF
cmake --build "$build" -j "$(nproc)"
built=$SECONDS
scripts/run_tests.sh "$build"
echo "test_with_wheel: wheel $((installed - start)) s, build $((built - installed)) s, tests $((SECONDS - built)) s"
