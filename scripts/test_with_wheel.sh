#!/usr/bin/env bash
# Builds and tests the sources against a PyTorch wheel: the newest release on PyPI, VERSION, or the
# newest wheel with pre-releases, which shows early what a version of libtorch will break.
#
#     scripts/test_with_wheel.sh [VERSION | --pre]
#
# VENV=FOLDER   the virtual environment to use. It is created, with torch and numpy, if it does not
#               exist. One that has torch is changed, and needs the network, only for an argument.
#               Default: in the build folder. Takes about 6 GB, because the wheel contains its CUDA
#               libraries.
# PIP_INDEX_URL=https://download.pytorch.org/whl/nightly/cpu  is pip's variable; with --pre it takes
#               last night's wheel.
# BUILD=FOLDER  the build folder. Default: build-wheel.
set -euo pipefail
cd "$(dirname "$0")/.."
# pip considers pre-releases of torch, and of nothing else, where the version asked for is one.
case $#${1:-} in
  0) torch=torch ;;
  1--pre) torch='torch>=2.6.dev0' ;;
  1[0-9]*) torch="torch==$1" ;;
  *)
    echo "usage: scripts/test_with_wheel.sh [VERSION | --pre]" >&2
    exit 2
    ;;
esac
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
if [ $# -gt 0 ] || ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  "$venv/bin/pip" install --quiet --upgrade "$torch" numpy
fi
"$venv/bin/python" -c 'import torch; print("test_with_wheel: torch", torch.__version__)'
torch=$("$venv/bin/python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent)')
installed=$SECONDS

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_TORCH="$torch"
cmake --build "$build" -j "$(nproc)"
built=$SECONDS
scripts/run_tests.sh "$build"
echo "test_with_wheel: wheel $((installed - start)) s, build $((built - installed)) s, tests $((SECONDS - built)) s"
