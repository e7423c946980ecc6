#!/usr/bin/env python3
"""Finds the largest GPT-2 that trains within a limit of memory, under each way of training.

    largest_model.py [--build build] [--python PYTHON] [--limit-gib 8] [--width 1024] [--ranks 2] [--only TEXT] [--json out.json]

Models differ in the number of layers alone: width 1024 (or --width), heads of 64, 50257 tokens in the vocabulary, sequences of 512, one
sequence a rank, float32, AdamW. A model trains if two steps end without an error in a memory cgroup with this limit, without swap. The peaks of two small
models give a first number of layers; from there a bisection ends where it trains with n layers and fails with n + 1. --python adds
PyTorch's FSDP2 and DeepSpeed's ZeRO-3 (torch_peer.py) run by this interpreter, whose PyTorch must be 2.4 or newer and which needs the
package deepspeed. Needs root and cgroups.
"""
import argparse, json, os, pathlib, subprocess, tempfile, time

HERE = pathlib.Path(__file__).resolve().parent
VOCABULARY, TOKENS = 50257, 512
CONFIG = f"""
model: {{type: GPT2, vocab_size: {VOCABULARY}, n_positions: {TOKENS}, n_layer: 1, dropout: 0, seed: 0}}
data: {{type: ByteText, path: /usr/share/common-licenses, seq_len: {TOKENS}, order: sequential}}
optimizer: {{type: AdamW, lr: 1e-4}}
train: {{steps: 2, global_batch: 2, eval_batches: 1}}
"""
FSDP = "parallel={type: FullyShardedDataParallel, wrap_policy: {type: name_based, patterns: transformer.h.*}}"
ZERO = "type: ZeroRedundancyOptimizer"
BOTH = "shard_gradients: true, share_parameters: true"
OURS = {
    "none": ["parallel.type=none"],
    "DistributedDataParallel": ["parallel.type=DistributedDataParallel"],
    "ZeroRedundancyOptimizer": [f"parallel={{{ZERO}}}"],
    "ZeRO, shard_gradients": [f"parallel={{{ZERO}, shard_gradients: true}}"],
    "ZeRO, both": [f"parallel={{{ZERO}, {BOTH}}}"],
    "ZeRO, both, activation checkpointing": [f"parallel={{{ZERO}, {BOTH}}}", "model.deferred=true", "model.activation_checkpointing=true"],
    "FullyShardedDataParallel": [FSDP],
    "FSDP, activation checkpointing": [FSDP, "model.activation_checkpointing=true"],
}
PEERS = {
    "PyTorch FSDP2": "fsdp2f",
    "PyTorch FSDP2, activation checkpointing": "fsdp2cf",
    "DeepSpeed ZeRO-3": "ds3f",
    "DeepSpeed ZeRO-3, activation checkpointing": "ds3cf",
}


class Cgroup:
    """A memory cgroup of either version."""

    def __init__(self, limit):
        root = pathlib.Path("/sys/fs/cgroup")
        self.v1 = (root / "memory").is_dir()
        self.folder = (root / "memory" if self.v1 else root) / f"tessera-{os.getpid()}"
        self.limit = limit

    def __enter__(self):
        self.folder.mkdir()
        (self.folder / ("memory.limit_in_bytes" if self.v1 else "memory.max")).write_text(str(self.limit))
        swap = self.folder / ("memory.memsw.limit_in_bytes" if self.v1 else "memory.swap.max")
        if swap.exists():
            swap.write_text(str(self.limit) if self.v1 else "0")
        return self

    def __exit__(self, *_):
        for _ in range(1000):  # helpers of a Python that has ended may end later
            left = (self.folder / "cgroup.procs").read_text().split()
            try:
                return self.folder.rmdir()
            except OSError:
                time.sleep(0.01)
        raise SystemExit(f"{self.folder}: processes {left} do not end")

    def run(self, command, env, folder):
        """Whether the command ends without an error, and its output."""
        enter = f"echo $$ > {self.folder}/cgroup.procs && exec \"$@\""
        done = subprocess.run(["bash", "-c", enter, "bash", *map(str, command)], env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3600)
        return done.returncode == 0, done.stdout

    def peak(self):
        return int((self.folder / ("memory.max_usage_in_bytes" if self.v1 else "memory.peak")).read_text())


def parameters(width, layers):
    return layers * (12 * width**2 + 13 * width) + (VOCABULARY + TOKENS + 2) * width


def command_of(args, way, layers):
    if way in PEERS:
        return [args.python, HERE / "torch_peer.py", PEERS[way], args.ranks, args.width, layers, args.width // 64, TOKENS, VOCABULARY, 1, 2]
    ranks = 1 if way == "none" else args.ranks
    shape = [f"model.n_embd={args.width}", f"model.n_head={args.width // 64}", f"model.n_layer={layers}"]
    return [args.build / "bin/tessera", "train", "-n", ranks, "c.yaml", *OURS[way], *shape, f"train.global_batch={ranks}"]


def largest(args, way, folder):
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"} | {"OMP_NUM_THREADS": "1"}
    limit = args.limit_gib << 30

    def probe(layers):
        with Cgroup(limit) as group:
            trains, output = group.run(command_of(args, way, layers), env, folder)
            return trains, group.peak(), output

    few, some = 2, 5
    low, high = probe(few), probe(some)
    if not (low[0] and high[0]):
        raise SystemExit(f"{way}: {some} layers did not train\n{high[2] if low[0] else low[2]}")
    layer = (high[1] - low[1]) / (some - few)
    trained, failed = some, None
    guess = max(some + 1, int(some + (limit - high[1]) / layer))
    while failed is None or failed - trained > 1:
        if probe(guess)[0]:
            trained = guess
        else:
            failed = guess
        guess = (trained + failed) // 2 if failed else trained + max(1, trained // 16)
    return trained, layer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--python")
    parser.add_argument("--limit-gib", default=8, type=int)
    parser.add_argument("--width", default=1024, type=int, help="a multiple of 64")
    parser.add_argument("--ranks", default=2, type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    print(f"{'way':<44}{'ranks':>6}{'layers':>8}{'parameters':>15}{'MiB a layer':>13}{'of limit / 16 bytes':>21}")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "c.yaml").write_text(CONFIG)
        for way in [*OURS, *(PEERS if args.python else [])]:
            if args.only not in way:
                continue
            layers, layer = largest(args, way, folder)
            count, ranks = parameters(args.width, layers), 1 if way == "none" else args.ranks
            share = 16 * count / (args.limit_gib << 30)
            rows.append({"way": way, "ranks": ranks, "layers": layers, "parameters": count, "mib_a_layer": round(layer / 2**20), "of_limit": round(share, 3)})
            print(f"{way:<44}{ranks:>6}{layers:>8}{count:>15,}{layer / 2**20:>13.0f}{share:>21.3f}", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"limit_gib": args.limit_gib, "width": args.width, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
