#!/usr/bin/env python3
"""Measures rare synchronisation on the job of the demo: bytes between groups, loss after equal tokens.

    local_sgd.py --build build [--config configs/demo.yaml] [--ranks 2] [--steps 200] [--seeds 1] [--only TEXT]
                 [--json out.json]

Each rank is a group of its own, as the ranks of a host are with an inner wrapper. bytes/token: payload
that a group sends for each token that it trained on. loss: on the evaluation data, at the end; with several
seeds (of weights and data order) their mean and the distance between the least and the greatest. The seeds
are interleaved, so that a run that is cut off has whole tables of the first ones; each table is printed.
"""
import argparse, json, os, pathlib, statistics, subprocess, sys

RUNS = {"DDP": ("ddp", 1, "float32", 0)}
for wire in ("float32", "int8"):
    for every in (1, 10, 50):
        RUNS[f"nesterov, k = {every}, {wire}"] = ("nesterov", every, wire, 0)
RUNS["average, k = 10, float32"] = ("average", 10, "float32", 0)
RUNS["nesterov, k = 10, int8, background"] = ("nesterov", 10, "int8", 1)


def run(args, options, seed):
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    env["OMP_NUM_THREADS"] = env["OPENBLAS_NUM_THREADS"] = "1"
    binaries = pathlib.Path(args.build) / "bin"
    command = [str(binaries / "tessera"), "run", "-n", str(args.ranks), str(binaries / "bench_local_sgd"), args.config,
               *map(str, options), str(args.steps), str(seed)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    lines = [line[line.index("{"):] for line in done.stdout.splitlines() if '"bytes_per_token"' in line]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(lines[-1])


def table(results):
    lines = ["| synchronisation | bytes/token | loss | range |", "|---|---|---|---|"]
    for name, runs in results.items():
        losses = [run["eval_loss"] for run in runs]
        lines.append(f"| {name} | {runs[0]['bytes_per_token']:,.1f} | {statistics.mean(losses):.3f} | "
                     f"{max(losses) - min(losses):.3f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--config", default=str(pathlib.Path(__file__).parent.parent / "configs/demo.yaml"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds; the loss is the mean over them")
    parser.add_argument("--only", default="", help="runs whose names contain this text")
    parser.add_argument("--json")
    args = parser.parse_args()
    if min(args.ranks, args.steps, args.seeds) < 1:
        parser.error(f"--ranks {args.ranks} --steps {args.steps} --seeds {args.seeds}: expected 1 or more of each")
    chosen = {name: options for name, options in RUNS.items() if args.only in name}
    if not chosen:
        parser.error(f"--only {args.only}: expected a part of one of: {', '.join(RUNS)}")
    results = {name: [] for name in chosen}
    for seed in range(1, args.seeds + 1):
        for name, options in chosen.items():
            results[name].append(run(args, options, seed))
        parameters = results[next(iter(chosen))][0]["parameters"]
        print(f"{args.ranks} ranks, {args.steps} steps, {parameters:,} parameters, {seed} of {args.seeds} seeds\n\n"
              f"{table(results)}\n", flush=True)
        if args.json:
            record = {"config": pathlib.Path(args.config).name, "ranks": args.ranks, "steps": args.steps, "results": results}
            pathlib.Path(args.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
