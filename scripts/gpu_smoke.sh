#!/usr/bin/env bash
# Runs Tessera on the CUDA devices of this machine: builds against a PyTorch wheel with NCCL, then
# trains one small model on the CPU and on the devices and compares the weights. About ten minutes.
#
#     scripts/gpu_smoke.sh
#
# TORCH=FOLDER  the torch folder of a wheel with CUDA. Default: that of python3.
# BUILD=FOLDER  the build folder. Default: build-cuda. With a build in it, only what has changed is
#               built.
# DEVICE=cpu    tries the script itself on a machine without a device: every run is on the CPU, with
#               the programs that BUILD has, and nothing is built.
#
# Ends with status 77 and says why where there is no device or no wheel with CUDA. Prints one line
# for each check; the status is 1 if one fails.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda}
build=${BUILD:-build-cuda}
steps=20

skip() {
  echo "gpu_smoke: skipped: $1" >&2
  exit 77
}

devices=1
if [ "$device" = cuda ]; then
  command -v nvidia-smi >/dev/null || skip "nvidia-smi was not found"
  devices=$(nvidia-smi --list-gpus | wc -l)
  [ "$devices" -gt 0 ] || skip "nvidia-smi lists no device"
  torch=${TORCH:-$(python3 -c 'import torch; print(torch.__path__[0])' 2>/dev/null || true)}
  [ -e "$torch/lib/libtorch_cuda.so" ] || skip "no wheel with CUDA: set TORCH to its torch folder"
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_TORCH="$torch" \
    -DTESSERA_WITH_NCCL=ON
  cmake --build "$build" -j "$(nproc)" --target tessera_cli bench_adam
fi
tessera=$build/bin/tessera
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
failed=0

check() {  # NAME COMMAND…
  local name=$1 start=$SECONDS
  shift
  if "$@" >"$out/log" 2>&1; then
    echo "gpu_smoke: ok      $name ($((SECONDS - start)) s)"
  else
    echo "gpu_smoke: FAILED  $name"
    tail -n 20 "$out/log"
    failed=1
  fi
}

train() {  # NAME RANKS CONFIG OVERRIDES…
  local name=$1 ranks=$2 config=$3
  shift 3
  check "train $name" "$tessera" train -n "$ranks" "configs/$config.yaml" "train.steps=$steps" \
    train.eval_every=0 train.log_every=1 "train.save=$out/$name.safetensors" "$@"
}

compare() {  # A B
  check "$1 and $2 have the same weights, to 1e-3" \
    "$tessera" weights diff "$out/$1.safetensors" "$out/$2.safetensors" --tolerance 1e-3
}

train reference 1 none
for wrapper in ddp zero fsdp; do
  train "$wrapper-1" 1 "$wrapper" "model.device=$device"
  compare reference "$wrapper-1"
done
if [ "$devices" -gt 1 ] || [ "$device" = cpu ]; then
  backend=nccl
  [ "$device" = cpu ] && backend=auto
  train reference-2 2 ddp
  for wrapper in ddp zero fsdp; do
    train "$wrapper-2" 2 "$wrapper" "model.device=$device" "parallel.backend=$backend"
    compare reference-2 "$wrapper-2"
  done
else
  echo "gpu_smoke: left out: 2 ranks, because NCCL needs a device for each and there is one"
fi
if [ "$device" = cuda ]; then
  check "fused Adam" "$build/bin/bench_adam"
fi
exit "$failed"
