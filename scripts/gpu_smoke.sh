#!/usr/bin/env bash
# Runs Tessera on the CUDA devices of this machine: builds against a PyTorch wheel with NCCL, runs
# the tests of tests/device on CUDA, trains one small model on the CPU and on the devices and
# compares the weights, and measures. About ten minutes.
#
#     scripts/gpu_smoke.sh
#
# TORCH=FOLDER   the torch folder of a wheel with CUDA. Default: that of python3.
# BUILD=FOLDER   the build folder. Default: build-cuda. With a build in it, only what has changed is
#                built.
# BUILT=yes      the programs of BUILD are used as they are.
# ROUNDS=N       how often each program is timed, in turn. Default: 2.
# PARTS="…"      what is run, of: tests train measure. Default: all.
# DEVICE=cpu     tries part `train` on a machine without a device: every run is on the CPU, with
#                the programs that BUILD has, and nothing is built.
#
# Where there is one device, two ranks share it and exchange through the host's memory. Ends with
# status 77 and says why where there is no device or no wheel with CUDA. Prints one line for each
# check; the status is 1 if one fails.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda}
build=${BUILD:-build-cuda}
parts=${PARTS:-tests train measure}
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
  if [ -z "${BUILT:-}" ]; then
    cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_TORCH="$torch" \
      -DTESSERA_WITH_NCCL=ON -DTESSERA_BUILD_BENCHMARKS=ON
    cmake --build "$build" -j "$(nproc)" --target tessera_cli tessera_train_cli \
      tessera_weights_cli test_cuda peer_twin bench_device_adam
  fi
else
  parts=train
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

train_all() {
  local wrapper backend
  train reference 1 none
  for wrapper in none ddp zero fsdp; do
    train "$wrapper-1" 1 "$wrapper" "model.device=$device"
    compare reference "$wrapper-1"
  done
  train reference-2 2 ddp
  # With one device auto copies through the host's memory, with more it is NCCL.
  local backends=auto
  [ "$device" = cuda ] && [ "$devices" -gt 1 ] && backends="auto nccl shm"
  for backend in $backends; do
    for wrapper in ddp zero fsdp; do
      train "$wrapper-2-$backend" 2 "$wrapper" "model.device=$device" "parallel.backend=$backend"
      compare reference-2 "$wrapper-2-$backend"
    done
  done
}

# Medians of the same training in C++ and in Python, one rank: the GPT of benchmarks/peer_twin.cpp
# with the sizes WIDTH LAYERS HEADS TOKENS VOCAB BATCH, in turn.
measure() {
  local sizes round strategy
  for sizes in "768 12 12 512 32768 8" "256 6 8 64 1024 2"; do
    echo "gpu_smoke: width, layers, heads, tokens, vocabulary, batch: $sizes"
    for ((round = 0; round < ${ROUNDS:-2}; ++round)); do
      for strategy in none ddp zero fsdp; do
        # shellcheck disable=SC2086
        "$build/bin/peer_twin" "$strategy-cuda" $sizes 22
      done
      for strategy in nonef ddpf zerovf fsdp2f; do
        # shellcheck disable=SC2086
        DEVICE=cuda python3 benchmarks/torch_peer.py "$strategy" 1 $sizes 22
      done
    done
  done
  "$build/bin/bench_device_adam"
}

for part in $parts; do
  case $part in
    tests) check "tests on CUDA" "$build/bin/test_cuda" ;;
    train) train_all ;;
    measure) measure || failed=1 ;;
    *) echo "gpu_smoke: PARTS: $part; expected tests, train or measure" >&2; exit 2 ;;
  esac
done
exit "$failed"
