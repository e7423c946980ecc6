#!/usr/bin/env bash
# Checks Tessera on the CUDA devices of this machine: builds against a PyTorch wheel with NCCL, runs
# each test of test_cuda, trains one small model on the CPU and on the devices and compares the
# weights, and measures beside PyTorch. Writes each verdict when it is known, and goes on where the
# last call ended: a check that has a verdict, also a bad one, is not run again.
#
#     scripts/gpu_check.sh [SECONDS]
#
# SECONDS        No check begins later than this. Default: 540.
# TORCH=FOLDER   the torch folder of a wheel with CUDA. Default: that of python3.
# BUILD=FOLDER   the build folder. Default: build-cuda.
# RESULTS=FOLDER verdicts.tsv (a line for each check: part, verdict, seconds, name), measures.jsonl
#                (a line for each program that was timed) and the output of what failed. Default:
#                gpu_check in the build folder. Without it all is checked anew.
# PARTS="…"      what is run, of: build tests train measure. Default: all.
# ROUNDS=N       how often each program is timed, in turn. Default: 2.
# JOBS=N         how many tests run at a time. Default: 8.
# DEVICE=sim     tries the script on a machine without a device. BUILD is then a build for CPUs with
#                benchmarks, and nothing is built. The tests are those of test_device, and one small
#                size is measured on the CPU.
#
# Where there is one device, two ranks share it and exchange through the host's memory. Ends with
# status 77 and says why where there is no device or no wheel with CUDA, and with status 1 where a
# check failed or was not reached.
set -euo pipefail
cd "$(dirname "$0")/.."
limit=${1:-540}
device=${DEVICE:-cuda}
build=$(realpath -m "${BUILD:-build-cuda}")
results=$(realpath -m "${RESULTS:-$build/gpu_check}")
parts=${PARTS:-build tests train measure}
steps=20

skip() {
  echo "gpu_check: skipped: $1" >&2
  exit 77
}

devices=1
tests=$build/bin/test_cuda
torch=
if [ "$device" = cuda ]; then
  command -v nvidia-smi >/dev/null || skip "nvidia-smi was not found"
  devices=$(nvidia-smi --list-gpus | wc -l)
  [ "$devices" -gt 0 ] || skip "nvidia-smi lists no device"
  torch=${TORCH:-$(python3 -c 'import torch; print(torch.__path__[0])' 2>/dev/null || true)}
  [ -e "$torch/lib/libtorch_cuda.so" ] || skip "no wheel with CUDA: set TORCH to its torch folder"
elif [ "$device" = sim ]; then
  parts=${parts/build/}
  tests=$build/bin/test_device
else
  echo "gpu_check: DEVICE = '$device': expected cuda or sim" >&2
  exit 2
fi
mkdir -p "$results"
touch "$results/verdicts.tsv" "$results/measures.jsonl"
rm -f "$results/not_reached"
export results

# check PART LIMIT NAME COMMAND…: unless NAME has a verdict or the time is over.
check() {
  local part=$1 most=$2 name=$3 start=$SECONDS verdict=ok file
  shift 3
  grep -qP "\t\Q$name\E$" "$results/verdicts.tsv" && return
  if [ $(($(date +%s) - began)) -ge "$limit" ]; then
    echo "gpu_check: not reached: $name"
    touch "$results/not_reached"
    return
  fi
  file=$results/$(tr -c 'A-Za-z0-9\n' _ <<<"$name").log
  if timeout -k 5 "$most" "$@" >"$file" 2>&1; then
    rm "$file"
  else
    [ $? -eq 124 ] && verdict="no end in $most s" || verdict=FAILED
  fi
  printf '%s\t%s\t%d\t%s\n' "$part" "$verdict" $((SECONDS - start)) "$name" >>"$results/verdicts.tsv"
  echo "gpu_check: $verdict: $name ($((SECONDS - start)) s)"
  [ "$verdict" = ok ] || tail -n 8 "$file"
}
began=$(date +%s)
export -f check
export began limit

build_all() {
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_TORCH="$torch" \
    -DTESSERA_WITH_NCCL=ON -DTESSERA_BUILD_BENCHMARKS=ON -DTESSERA_BUILD_EXAMPLES=OFF \
    -DTESSERA_WERROR=OFF
  cmake --build "$build" -j "$(nproc)" --target tessera_cli tessera_train_cli \
    tessera_weights_cli test_cuda peer_twin bench_device_adam
}

# Tests that stop or kill a rank come last: they take longest where something is wrong.
test_all() {
  export tests
  "$tests" --gtest_list_tests | awk '/^[^ ]+\.$/ { suite = $1 } /^  / { print suite $1 }' |
    awk '/Killed|Stopped|Lost|Ended|ThatEnds/ { late[n++] = $0; next } { print }
         END { for (i = 0; i < n; ++i) print late[i] }' |
    xargs -P "${JOBS:-8}" -I NAME \
      bash -c 'check tests 90 "$1" "$tests" --gtest_filter="$1" --gtest_brief=1' - NAME
}

train() {  # NAME RANKS CONFIG OVERRIDES…
  local name=$1 ranks=$2 config=$3
  shift 3
  check train 120 "train $name" "$build/bin/tessera" train -n "$ranks" "configs/$config.yaml" \
    "train.steps=$steps" train.eval_every=0 train.log_every=1 \
    "train.save=$results/$name.safetensors" "$@"
}

compare() {  # A B
  check train 60 "$1 and $2 have the same weights, to 1e-3" \
    "$build/bin/tessera" weights diff "$results/$1.safetensors" "$results/$2.safetensors" \
    --tolerance 1e-3
}

train_all() {
  local wrapper backend where=$device
  [ "$device" = cuda ] || where=cpu
  train reference 1 none
  for wrapper in none ddp zero fsdp; do
    train "$wrapper-1" 1 "$wrapper" "model.device=$where"
    compare reference "$wrapper-1"
  done
  train master-weights-1 1 zero "model.device=$where" model.param_dtype=bfloat16
  train reference-2 2 ddp
  # With one device auto copies through the host's memory, with more it is NCCL.
  local backends=auto
  [ "$device" = cuda ] && [ "$devices" -gt 1 ] && backends="auto nccl shm"
  for backend in $backends; do
    for wrapper in ddp zero fsdp; do
      train "$wrapper-2-$backend" 2 "$wrapper" "model.device=$where" "parallel.backend=$backend"
      compare reference-2 "$wrapper-2-$backend"
    done
  done
}

# One program, whose line of medians goes to measures.jsonl with the name of its row.
time_one() {  # ROW COMMAND…
  local row=$1 line
  shift
  line=$("$@" | grep '^{') || return 1
  printf '{"row": "%s", "result": %s}\n' "$row" "$line" >>"$results/measures.jsonl"
}
export -f time_one

# The GPT of benchmarks/peer_twin.cpp in C++ and in Python, one rank, in turn. A row: name, settings,
# WIDTH LAYERS HEADS TOKENS VOCAB BATCH, ours, PyTorch's.
measure_row() {
  local row=$1 settings=$2 sizes=$3 ours=$4 theirs=$5 round strategy suffix=-cuda
  [ "$device" = cuda ] || suffix=
  for ((round = 1; round <= ${ROUNDS:-2}; ++round)); do
    for strategy in $ours; do
      # shellcheck disable=SC2086
      check measure 120 "$row, $strategy, round $round" env $settings bash -c 'time_one "$@"' - \
        "$row" "$build/bin/peer_twin" "$strategy$suffix" $sizes 22
    done
    [ "$device" = cuda ] || continue
    for strategy in $theirs; do
      # shellcheck disable=SC2086
      check measure 120 "$row, PyTorch's $strategy, round $round" env DEVICE=cuda $settings \
        bash -c 'time_one "$@"' - "$row" python3 benchmarks/torch_peer.py "$strategy" 1 $sizes 22
    done
  done
}

measure_all() {
  local wrappers="none ddp zero fsdp" theirs="nonef ddpf zerovf fsdp2f" fast=GPT_ATTENTION=fused
  if [ "$device" = sim ]; then
    measure_row "tiny, float32" GPT_DTYPE=float32 "32 2 2 16 64 2" "$wrappers" ""
    measure_row "tiny, bfloat16" GPT_DTYPE=bfloat16 "32 2 2 16 64 2" "$wrappers" ""
    measure_row "tiny, checkpointed" GPT_CHECKPOINT=1 "32 2 2 16 64 2" fsdp ""
    return
  fi
  local bf16="$fast GPT_DTYPE=bfloat16"
  measure_row "136M, float32" GPT_DTYPE=float32 "768 12 12 512 32768 8" "$wrappers" "$theirs"
  measure_row "136M, bfloat16, fused attention" "$bf16" "768 12 12 1024 32768 8" "$wrappers" \
    "$theirs"
  measure_row "6M, float32" GPT_DTYPE=float32 "256 6 8 64 1024 2" "$wrappers" "$theirs"
  check measure 60 "FusedAdam" bash -c '"$0" >"$results/fused_adam.txt"' \
    "$build/bin/bench_device_adam"
  measure_row "1.3B, bfloat16, fused attention" "$bf16" "2048 24 16 1024 32768 4" \
    "none zero fsdp" "nonef fsdp2f"
  measure_row "1.3B, bfloat16, fused attention, checkpointed" "$bf16 GPT_CHECKPOINT=1" \
    "2048 24 16 1024 32768 4" fsdp fsdp2f
  measure_row "136M, bfloat16, fused attention, offload" "$bf16 GPT_OFFLOAD=1" \
    "768 12 12 1024 32768 8" fsdp fsdp2f
  measure_row "1.3B, float32, fused attention" "$fast" "2048 24 16 1024 32768 4" \
    "none fsdp" "nonef fsdp2f"
}

for part in $parts; do
  case $part in
    build)
      build_all >"$results/build.log" 2>&1 || { tail -n 30 "$results/build.log"; exit 1; }
      echo "gpu_check: built ($(($(date +%s) - began)) s)" ;;
    tests) test_all ;;
    train) train_all ;;
    measure) measure_all ;;
    *) echo "gpu_check: PARTS: $part; expected build, tests, train or measure" >&2; exit 2 ;;
  esac
done
bad=$(grep -cvP '^\w+\tok\t' "$results/verdicts.tsv" || true)
echo "gpu_check: $(wc -l <"$results/verdicts.tsv") checks have a verdict, $bad did not pass"
[ "$bad" -eq 0 ] && [ ! -e "$results/not_reached" ]
