#!/usr/bin/env python3
"""Measures the time from exec to the end of the first all-reduce on all ranks.

    startup.py [--build build] [--python python3] [--ranks 2] [--rounds 9] [--json out.json]

PyTorch's program imports torch and its ZeroRedundancyOptimizer.
"""
import argparse, json, os, pathlib, socket, statistics, subprocess, time

PEER = """
import torch, torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("done", flush=True)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def once(command, ranks):
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    env.update(OMP_NUM_THREADS="1", USE_LIBUV="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    start = time.perf_counter()
    processes = [subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in range(ranks)]
    for process in processes:
        if process.stdout.readline().strip() != "done":
            raise SystemExit(f"{command[0]}: a rank did not come to its first all-reduce")
    seconds = time.perf_counter() - start
    for process in processes:
        process.wait(60)
    return seconds * 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build", type=pathlib.Path)
    parser.add_argument("--python", default="/usr/bin/python3")
    parser.add_argument("--ranks", default=2, type=int)
    parser.add_argument("--rounds", default=9, type=int)
    parser.add_argument("--json")
    args = parser.parse_args()
    sides = {"tessera": [str(args.build / "bin/peer_twin"), "startup"], "pytorch": [args.python, "-c", PEER]}
    times = {side: [] for side in sides}
    for round_ in range(args.rounds + 1):
        for side, command in sides.items():
            taken = once(command, args.ranks)
            if round_ > 0:  # the first one warms the page cache
                times[side].append(taken)
    medians = {side: statistics.median(values) for side, values in times.items()}
    ratio = medians["tessera"] / medians["pytorch"]
    print(f"exec to first all-reduce, {args.ranks} ranks: {medians['tessera']:.0f} ms / {medians['pytorch']:.0f} ms = {ratio:.2f} (target 0.50)")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"medians_ms": medians, "ratio": ratio, "target": 0.5}, indent=1))


if __name__ == "__main__":
    main()
