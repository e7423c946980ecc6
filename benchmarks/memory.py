#!/usr/bin/env python3
"""Measures the peak memory of each rank for GPT-2 of 124M parameters under each way of training.

    memory.py [--build build] [--ranks 2] [--steps 4] [--only TEXT] [--json out.json]

RSS and PSS are sampled. The table compares PSS with the formula of each way, 150 MiB + activations
+ 16 bytes x parameters, of which 4 are the parameters, 4 the gradients and 8 the state of AdamW.
ZeroRedundancyOptimizer divides the state by the ranks, with shard_gradients also the gradients,
beside which are the two largest buckets; with share_parameters the ranks have the parameters once,
so that each one's PSS has its part of them. FullyShardedDataParallel divides all, beside which are the
two largest units, whether or not the model is deferred. The activations, with everything else that
autograd holds for a time, are what the plain run on one rank's batch takes above
150 MiB + 16 bytes x parameters. The ways with long sequences run plainly on two sequences of 1024
tokens; their activations are those of docs/memory.md, which backward needs before it has gradients.
--only measures the plain run and the ways that contain TEXT.
"""
import argparse, json, os, pathlib, re, subprocess, tempfile, threading, time

CONFIG = """
model: {type: GPT2, vocab_size: 50257, n_positions: 1024, n_embd: 768, n_layer: 12, n_head: 12, seed: 0}
data: {type: ByteText, path: /usr/share/common-licenses, seq_len: 64, order: sequential}
optimizer: {type: AdamW, lr: 1e-4}
parallel: {type: none}
train: {steps: 4, global_batch: 2, eval_batches: 1}
"""
PARAMETERS = 124_439_808
WIDTH, HEADS, LAYERS, VOCABULARY = 768, 12, 12, 50257
EMBEDDING = 4 * VOCABULARY * WIDTH
# Bytes of the root with the tied embedding, and of one block.
LARGEST_UNITS = EMBEDDING + 4 * (1024 * WIDTH + 2 * WIDTH) + 4 * 7_087_872
# The bucket with the embedding, and one of 25 MiB to which the last parameter of a block comes.
LARGEST_BUCKETS = EMBEDDING + 25 * 2**20 + 25 * 2**20 + 4 * 4 * WIDTH * WIDTH
LONG, BATCH = 1024, 2


def long_sequences(kept):
    """Bytes of a plain run on long sequences whose blocks keep `kept` bytes for backward: those of its end, where the
    gradient of the embedding is added to that of the tied head, or those of its beginning, whichever are more."""
    loss = 2**25 + EMBEDDING + 4 * WIDTH * BATCH * LONG
    return max(16 * PARAMETERS + 2 * EMBEDDING, 12 * PARAMETERS + kept + loss)


BLOCK, BLOCK_INPUT = 4 * BATCH * LONG * (17 * WIDTH + HEADS), 4 * BATCH * LONG * WIDTH
PLAIN_LONG = ["parallel.type=none", "model.dropout=0", "train.eval_batches=0", f"data.seq_len={LONG}", f"train.global_batch={BATCH}"]
LONG_WAYS = {
    "none, long sequences": (PLAIN_LONG, long_sequences(LAYERS * BLOCK)),
    "none, long, checkpointing": ([*PLAIN_LONG, "model.activation_checkpointing=true"], long_sequences(LAYERS * BLOCK_INPUT + BLOCK)),
}
FSDP = "parallel={type: FullyShardedDataParallel, wrap_policy: {type: name_based, patterns: transformer.h.*}}"
# Overrides, bytes of a parameter on every rank, bytes that the ranks divide, and what comes beside.
WAYS = {
    "none": (["parallel.type=none"], 16, 0, 0),
    "DistributedDataParallel": (["parallel.type=DistributedDataParallel"], 16, 0, 0),
    "ZeroRedundancyOptimizer": (["parallel.type=ZeroRedundancyOptimizer"], 8, 8, 0),
    "ZeRO, shard_gradients": (["parallel={type: ZeroRedundancyOptimizer, shard_gradients: true}"], 4, 12, LARGEST_BUCKETS),
    "ZeRO, share_parameters": (["parallel={type: ZeroRedundancyOptimizer, share_parameters: true}"], 4, 12, 0),
    "ZeRO, both": (["parallel={type: ZeroRedundancyOptimizer, shard_gradients: true, share_parameters: true}"], 0, 16, LARGEST_BUCKETS),
    "FullyShardedDataParallel": ([FSDP], 0, 16, LARGEST_UNITS),
    "FSDP, not deferred": ([FSDP, "model.deferred=false"], 0, 16, LARGEST_UNITS),
}


def children(pid):
    try:
        return [int(p) for p in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants(pid):
    found = [pid]
    for child in children(pid):
        found += descendants(child)
    return found


def sample(pid):
    try:
        text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0, 0
    return tuple(int(re.search(rf"(?m)^{name}:\s+(\d+)", text)[1]) / 1024 for name in ("Rss", "Pss")) if "Pss" in text else (0, 0)


def is_rank(pid):
    try:
        return b"tessera-train" in pathlib.Path(f"/proc/{pid}/comm").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def sample_ranks(pid, ranks):
    """RSS and PSS in MiB of each rank below process `pid`. Empty unless all ranks run: one that ends leaves its part of shared pages
    to the others' PSS."""
    found = {rank: sample(rank) for rank in descendants(pid) if is_rank(rank)}
    return found if len(found) == ranks and all(sample(rank)[1] for rank in found) else {}


def measure(build, ranks, steps, overrides, folder):
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"} | {"OMP_NUM_THREADS": "1"}
    command = [str(build / "bin/tessera"), "train", "-n", str(ranks), str(config), f"train.steps={steps}", *overrides]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = []
    reader = threading.Thread(target=lambda: output.extend(process.stdout), daemon=True)
    reader.start()
    peaks = {}
    while process.poll() is None:
        for pid, (rss, pss) in sample_ranks(process.pid, ranks).items():
            before = peaks.get(pid, (0, 0))
            peaks[pid] = (max(rss, before[0]), max(pss, before[1]))
        time.sleep(0.02)
    reader.join(5)
    if process.returncode:
        raise SystemExit("".join(output))
    return max(rss for rss, _ in peaks.values()), max(pss for _, pss in peaks.values())


def row_of(way, ranks, rss, pss, formula):
    return {"way": way, "ranks": ranks, "peak_rss_mib": round(rss), "peak_pss_mib": round(pss), "formula_mib": round(formula), "pss_to_formula": round(pss / formula, 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build", type=pathlib.Path)
    parser.add_argument("--ranks", default=2, type=int)
    parser.add_argument("--steps", default=4, type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    args = parser.parse_args()
    activations = 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for way, (overrides, whole, divided, beside) in WAYS.items():
            if way != "none" and args.only not in way:
                continue
            ranks = 1 if way == "none" else args.ranks
            batch = [f"train.global_batch={ranks}"]  # one sequence a rank
            rss, pss = measure(args.build, ranks, args.steps, overrides + batch, pathlib.Path(folder))
            if way == "none":
                activations = max(0, pss - 150 - 16 * PARAMETERS / 2**20)
            formula = 150 + (PARAMETERS * (whole + divided / ranks) + beside) / 2**20 + activations
            rows.append(row_of(way, ranks, rss, pss, formula))
        for way, (overrides, bytes_of_formula) in LONG_WAYS.items():
            if args.only not in way:
                continue
            rss, pss = measure(args.build, 1, args.steps, overrides, pathlib.Path(folder))
            rows.append(row_of(way, 1, rss, pss, 150 + bytes_of_formula / 2**20))
    print(f"activations: {activations:.0f} MiB")
    print(f"{'way':<28}{'ranks':>6}{'peak RSS MiB':>14}{'peak PSS MiB':>14}{'formula MiB':>13}{'PSS / formula':>15}")
    for row in rows:
        print(f"{row['way']:<28}{row['ranks']:>6}{row['peak_rss_mib']:>14}{row['peak_pss_mib']:>14}{row['formula_mib']:>13}{row['pss_to_formula']:>15.3f}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"activations_mib": activations, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
