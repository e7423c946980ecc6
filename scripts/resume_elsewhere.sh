#!/usr/bin/env bash
# Trains a small GPT-2 on 4 ranks with ZeroRedundancyOptimizer, stops it in the middle as a batch
# system would (SIGTERM), and goes on on 2 ranks with FullyShardedDataParallel. Takes about a minute.
#
#     scripts/resume_elsewhere.sh [OUT]
#
# OUT (default: resume-out) gets the log, the checkpoints, a report and the picture of README.md.
# BUILD=FOLDER  the build folder. Default: build.
set -euo pipefail
cd "$(dirname "$0")/.."
tessera=$PWD/${BUILD:-build}/bin/tessera
out=${1:-resume-out}
mkdir -p "$out"
export OMP_NUM_THREADS=1

# Called in subshells, which the launcher replaces: it then gets the signal itself.
train() {
  exec "$tessera" train -n "$1" configs/zero.yaml model.n_layer=2 model.n_embd=64 train.steps=240 \
    train.eval_every=20 train.eval_batches=4 train.log="$out/log.jsonl" train.log_every=20 \
    checkpoint.folder="$out/checkpoints" "${@:2}"
}

rm -rf "$out/checkpoints" "$out/log.jsonl"
train 4 &
launcher=$!
while kill -0 $launcher 2>/dev/null && [ "$(cat "$out/log.jsonl" 2>/dev/null | wc -l)" -lt 120 ]; do
  sleep 0.1
done
kill -TERM $launcher
wait $launcher || [ $? -eq 143 ] # 128 + SIGTERM: the run has written a checkpoint

(train 2 "parallel={type: FullyShardedDataParallel, wrap_policy: {type: size_based, min_numel: 20000}}")
"$tessera" report "$out/log.jsonl" -o "$out/report.html"
scripts/draw_resume.py "$out/log.jsonl" "$out/loss.svg"
