#!/usr/bin/env bash
# Compiles the sources that need CUDA and NCCL, without code generation. Needs no GPU.
#
#     scripts/check_cuda_compiles.sh [TORCH]
#
# TORCH  the torch folder of a PyTorch wheel with CUDA. Default: $TESSERA_TORCH, else that of `make
#        wheel`, else that of python3. The headers of CUDA and NCCL are those of the wheel's
#        packages, else the system's.
#
# Ends with status 77 and says why where something is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
sources=(
  src/comm/device/nccl_backend.cpp tests/harness/cuda/on_device.cpp
  tests/harness/cuda/runtime_calls.cpp)

skip() {
  echo "check_cuda_compiles: skipped: $1" >&2
  exit 77
}
first_with() {  # FILE FOLDER…: the first folder that has the file
  local file=$1 folder
  shift
  for folder in "$@"; do
    if [ -e "$folder/$file" ]; then
      echo "$folder"
      return
    fi
  done
}

torch=${1:-${TESSERA_TORCH:-}}
for folder in build-wheel/venv/lib/python3*/site-packages/torch; do
  [ -n "$torch" ] || [ ! -e "$folder/lib/libtorch_cuda.so" ] || torch=$folder
done
if [ -z "$torch" ]; then
  torch=$(python3 -c 'import torch; print(torch.__path__[0])' 2>/dev/null) ||
    skip "python3 has no torch, and TESSERA_TORCH is not set"
fi
[ -e "$torch/lib/libtorch_cuda.so" ] || skip "the libtorch of $torch was built without CUDA"
packages=$torch/../nvidia
system=(/usr/local/cuda/include /usr/include)
cuda=$(first_with crt/host_defines.h \
  "$packages"/cu*/include "$packages/cuda_runtime/include" "${system[@]}")
[ -n "$cuda" ] || skip "crt/host_defines.h was not found"
nccl=$(first_with nccl.h "$packages/nccl/include" "$cuda" "${system[@]}")
[ -n "$nccl" ] || skip "nccl.h was not found"

for source in "${sources[@]}"; do
  "${CXX:-c++}" -std=c++20 -fsyntax-only -DUSE_C10D_NCCL -DUSE_C10D_GLOO -Iinclude -Isrc -Itests \
    -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" \
    -isystem "$nccl" -isystem "$cuda" "$source"
  echo "check_cuda_compiles: $source compiles with $("$torch/../../../../bin/python" -c \
    'import torch; print("PyTorch", torch.__version__)' 2>/dev/null || echo "$torch")"
done
