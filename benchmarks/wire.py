#!/usr/bin/env python3
"""Measures option wire on the job of the demo: bytes between two hosts, time and loss.

    wire.py --build build [--config configs/demo.yaml] [--ranks 1] [--rate 1gbit] [--steps 700]
            [--seeds 0,1,2] [--wrappers ddp,zero,fsdp] [--json out.json]

The hosts are network namespaces, joined by a cable of that rate. MB/step: bytes that arrive at host
0. loss: on the evaluation data, at the end. change: of the loss, relative to float32. Needs root, ip
and tc. Removes the namespaces at its end.
"""
import argparse, json, pathlib, statistics, subprocess, sys, tempfile, time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/harness"))
from hosts import arrived, environment, limit
from two_hosts import ADDRESSES, TwoHosts

TYPES = {"ddp": "DistributedDataParallel", "zero": "ZeroRedundancyOptimizer", "fsdp": "FullyShardedDataParallel"}
FORMATS = ("float32", "bfloat16", "int8")
PORTS = iter(range(32000, 33000))


def train(hosts, args, wrapper, gradients, parameters, seed):
    """The bytes that arrived, the seconds of the program, and the loss at its end."""
    binaries, port = pathlib.Path(args.build).resolve() / "bin", next(PORTS)
    options = [f"train.steps={args.steps}", f"train.eval_every={args.steps}", f"parallel.type={TYPES[wrapper]}", f"model.seed={seed}",
               f"parallel.wire.gradients={gradients}", "train.save=null", "train.sample=null", "train.save_config=false"]
    if parameters != "float32":
        options.append(f"parallel.wire.parameters={parameters}")
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log.jsonl"
        before, start, processes = arrived(hosts), time.monotonic(), []
        try:
            for host in range(2):
                command = [binaries / "tessera", "run", "--nnodes", 2, "--node-rank", host, "-n", args.ranks,
                           "--master-addr", ADDRESSES[0], "--master-port", port, binaries / "tessera-train",
                           args.config, *options, f"train.log={log}"]
                processes.append(subprocess.Popen(hosts.command(host, *command), env=environment(), text=True,
                                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            outputs = [process.communicate(timeout=3600)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        seconds = time.monotonic() - start
        for process, output in zip(processes, outputs):
            if process.returncode:
                sys.exit(f"{' '.join(process.args)}: exit {process.returncode}\n{output}")
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    return arrived(hosts) - before, seconds, losses[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--config", default=str(HERE.parent / "configs/demo.yaml"))
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--rate", default="1gbit", help="as tc writes it, or none")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seeds", default="0", help="of the weights, as 0,1,2; the figures are means")
    parser.add_argument("--wrappers", default="ddp,zero,fsdp")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    print("| wrapper | gradients | parameters | MB/step | ms/step | loss | change |\n|---|---|---|---|---|---|---|")
    hosts = TwoHosts()
    try:
        limit(hosts, args.rate, None)
        for wrapper in args.wrappers.split(","):
            exact = None
            for wire in FORMATS:
                parameters = "float32" if wrapper == "ddp" else wire
                runs = [train(hosts, args, wrapper, wire, parameters, seed) for seed in map(int, args.seeds.split(","))]
                count, seconds, loss = (statistics.mean(figures) for figures in zip(*runs))
                exact = loss if exact is None else exact
                row = {"wrapper": wrapper, "gradients": wire, "parameters": parameters, "mb": count / args.steps / 1e6,
                       "ms": seconds / args.steps * 1e3, "loss": loss, "change": loss / exact - 1, "losses": [run[2] for run in runs]}
                rows.append(row)
                print(f"| {wrapper} | {wire} | {parameters} | {row['mb']:.2f} | {row['ms']:.1f} | {loss:.4f} | "
                      f"{row['change']:+.2%} |", *(f"{each:.4f}" for each in row["losses"][1:] and row["losses"]), flush=True)
    finally:
        hosts.remove()
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
