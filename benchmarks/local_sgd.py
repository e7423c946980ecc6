#!/usr/bin/env python3
"""Measures rare synchronisation on the job of the demo: bytes between groups, loss after equal tokens.

    local_sgd.py --build build [--config configs/demo.yaml] [--ranks 2] [--steps 200] [--json out.json]

Each rank is a group of its own, as the ranks of a host are with an inner wrapper. bytes/token: payload
that a group sends for each token that it trained on. loss: on the evaluation data, at the end.
"""
import argparse, json, os, pathlib, subprocess, sys

RUNS = {"DDP": ("ddp", 1, "float32", 0)}
for wire in ("float32", "int8"):
    for every in (1, 10, 50):
        RUNS[f"nesterov, k = {every}, {wire}"] = ("nesterov", every, wire, 0)
RUNS["average, k = 10, float32"] = ("average", 10, "float32", 0)
RUNS["nesterov, k = 10, int8, background"] = ("nesterov", 10, "int8", 1)


def run(args, options):
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    env["OMP_NUM_THREADS"] = env["OPENBLAS_NUM_THREADS"] = "1"
    binaries = pathlib.Path(args.build) / "bin"
    command = [str(binaries / "tessera"), "run", "-n", str(args.ranks), str(binaries / "bench_local_sgd"), args.config,
               *map(str, options), str(args.steps)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    lines = [line[line.index("{"):] for line in done.stdout.splitlines() if '"bytes_per_token"' in line]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(lines[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--config", default=str(pathlib.Path(__file__).parent.parent / "configs/demo.yaml"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json")
    args = parser.parse_args()
    print("| synchronisation | bytes/token | loss |\n|---|---|---|")
    results = {}
    for name, options in RUNS.items():
        result = results[name] = run(args, options)
        print(f"| {name} | {result['bytes_per_token']:,.1f} | {result['eval_loss']:.3f} |", flush=True)
    print(f"\n{args.ranks} ranks, {args.steps} steps, {results['DDP']['parameters']:,} parameters")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"config": pathlib.Path(args.config).name, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
