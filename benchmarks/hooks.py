#!/usr/bin/env python3
"""Measures DistributedDataParallel's communication hooks on the job of the demo: bytes, time, loss.

    hooks.py --build build [--config configs/demo.yaml] [--ranks 2] [--steps 200] [--json out.json]

bytes/step: all-reduce payload that one rank sends per step, over the whole run. ms/step: median of
the steps' times. loss: mean of the last ten steps.
"""
import argparse, json, os, pathlib, statistics, subprocess, sys, tempfile

POWER = "comm_hook: power_sgd, power_sgd_start_iteration: 20, power_sgd_rank: "
HOOKS = {"none": "comm_hook: none", "fp16": "comm_hook: fp16", "bf16": "comm_hook: bf16",
         "PowerSGD rank 1": POWER + "1", "PowerSGD rank 4": POWER + "4", "PowerSGD rank 16": POWER + "16"}


def run(args, options):
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    env["OMP_NUM_THREADS"] = "1"
    binaries = pathlib.Path(args.build) / "bin"
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log.jsonl"
        command = [str(binaries / "tessera"), "run", "-n", str(args.ranks), str(binaries / "bench_hooks"), args.config,
                   f"parallel={{type: DistributedDataParallel, {options}}}", f"train.steps={args.steps}", f"train.log={log}", "train.log_every=1000000",
                   "train.save=null", "train.save_config=false", "train.eval_every=0", "train.sample=null", "scheduler.decay_steps=0"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
        lines = [line[line.index("{"):] for line in done.stdout.splitlines() if '"bytes_per_step"' in line]
        if done.returncode or not lines:
            sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        result = json.loads(lines[-1])
        result["ms"] = statistics.median(json.loads(line)["ms"] for line in log.read_text().splitlines())
        return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--config", default=str(pathlib.Path(__file__).parent.parent / "configs/demo.yaml"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json")
    args = parser.parse_args()
    print(f"{'hook':<18} {'bytes/step':>12} {'of none':>8} {'ms/step':>8} {'loss':>8} {'eval':>8}")
    results = {}
    for name, options in HOOKS.items():
        result = results[name] = run(args, options)
        share = result["bytes_per_step"] / results["none"]["bytes_per_step"]
        print(f"{name:<18} {result['bytes_per_step']:>12,} {share:>8.1%} {result['ms']:>8.1f} {result['loss']:>8.4f} {result.get('eval_loss', float('nan')):>8.4f}",
              flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"config": pathlib.Path(args.config).name, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
