#!/usr/bin/env python3
"""Compares Tessera with PyTorch on two hosts: network namespaces, joined by a cable of a given rate.

    hosts.py --build build [--python python3] [--rounds 5] [--ranks 1,2,4] [--rates 1gbit]
             [--strategies ddp,zero,fsdp] [--delay 0.5ms] [--before OTHER_BUILD] [--json out.json]

Both programs run in turn, with each number of ranks on each host. Prints medians of a step in
milliseconds, their ratio, and the bytes that arrive at host 0 in a step, in units of P, the bytes of
all parameters. "least" is the time of the bytes that must arrive, P for DDP and ZeRO and 1.5 P for
FSDP. Strategies: ddp, zero, fsdp, and ddp-int8, fsdp-bfloat16 and so on, with that option `wire`
on our side. Without --python only our side runs. --before: another build of ours instead of PyTorch.
Needs root, ip and tc, and netem in the kernel for --delay. Removes the namespaces at its end.
"""
import argparse, json, os, pathlib, re, statistics, subprocess, sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/harness"))
from two_hosts import ADDRESSES, TwoHosts, ip

MODEL = "512 6 8 64 256 1".split()
NEEDED = {"ddp": 1.0, "zero": 1.0, "fsdp": 1.5}  # P into each host
THEIRS = {"ddp": "ddp", "zero": "zerov", "fsdp": "fsdp"}
WIDTHS = {"": 4, "bfloat16": 2, "int8": 1 + 4 / 256}  # bytes of a value
PORTS = iter(range(29600, 32000))


def tc(*words):
    done = subprocess.run(["tc", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"tc {' '.join(words)}: {done.stderr.strip()}")


def limit(hosts, rate, delay):
    for name, cable in zip(hosts.names, hosts.cables):
        if rate != "none":
            tc("-n", name, "qdisc", "add", "dev", cable, "root", "handle", "1:", "tbf", "rate", rate, "burst", "1mb",
               "latency", "50ms")
        if delay:
            place = ["root"] if rate == "none" else ["parent", "1:"]
            tc("-n", name, "qdisc", "add", "dev", cable, *place, "netem", "delay", delay)


def bits_per_second(rate):
    number, unit = re.fullmatch(r"([\d.]+)([kmgt]?)bit", rate).groups()
    return float(number) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[unit]


def arrived(hosts):
    """Bytes that host 0 has received."""
    lines = ip("-n", hosts.names[0], "-s", "link", "show", "dev", hosts.cables[0]).splitlines()
    return int(lines[[i for i, line in enumerate(lines) if "RX:" in line][0] + 1].split()[0])


def environment(**more):
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    return env | {"OMP_NUM_THREADS": "1", "USE_LIBUV": "0", "TESSERA_SECRET": "shared by all hosts"} | more


def finish(processes):
    """The JSON line of rank 0, after all have ended."""
    outputs = []
    try:
        for process in processes:
            outputs.append((process.communicate(timeout=600), process))
    finally:
        for process in processes:
            process.kill()
    for (_, errors), process in outputs:
        if process.returncode:
            sys.exit(f"{' '.join(process.args)}: exit {process.returncode}\n{errors}")
    line = [line for line in outputs[0][0][0].splitlines() if line.startswith("{")][-1]
    return json.loads(line)


class Bench:
    def __init__(self, hosts, ranks, args):
        self.hosts, self.ranks, self.args = hosts, ranks, args

    def start(self, host, command, **env):
        return subprocess.Popen(self.hosts.command(host, *command), env=environment(**env), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def ours(self, build, strategy, steps):
        port = next(PORTS)
        tool, twin = (pathlib.Path(build).resolve() / "bin" / name for name in ("tessera", "peer_twin"))
        return finish([self.start(host, [tool, "run", "--nnodes", 2, "--node-rank", host, "-n", self.ranks, "--master-addr",
                                         ADDRESSES[0], "--master-port", port, twin, strategy, *MODEL, steps]) for host in range(2)])

    def pytorch(self, strategy, steps):
        port, world = next(PORTS), 2 * self.ranks
        return finish([self.start(rank // self.ranks, [self.args.python, HERE / "torch_peer.py", strategy, world, *MODEL, steps],
                                  RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(port),
                                  GLOO_SOCKET_IFNAME=self.hosts.cables[rank // self.ranks]) for rank in range(world)])

    def run(self, side, strategy, steps):
        if side == "ours":
            return self.ours(self.args.build, strategy, steps)
        if self.args.before:
            return self.ours(self.args.before, strategy, steps)
        return self.pytorch(THEIRS[strategy.split("-")[0]], steps)

    def bytes_per_step(self, side, strategy):
        counts = []
        for steps in (4, 9):
            before = arrived(self.hosts)
            parameters = self.run(side, strategy, steps)["parameters"]
            counts.append(arrived(self.hosts) - before)
        return (counts[1] - counts[0]) / 5 / (4 * parameters)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--python", metavar="INTERPRETER", help="that has PyTorch")
    parser.add_argument("--before", metavar="BUILD", help="compare with this other build of ours instead of PyTorch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="1,2,4", help="on each host")
    parser.add_argument("--rates", default="1gbit", help="as tc writes them, or none")
    parser.add_argument("--delay", help="in each direction, as netem writes it")
    parser.add_argument("--strategies", default="ddp,zero,fsdp")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--json")
    args = parser.parse_args()
    sides = ["ours", "theirs"] if args.python or args.before else ["ours"]
    rows = []
    print(f"{'rate':8} {'ranks':6} {'strategy':13} {'compute':>8} {'least':>7} {'ours ms':>8} {'theirs':>8} {'ratio':>6} "
          f"{'bytes':>7} {'theirs':>7}", flush=True)
    for rate in args.rates.split(","):
        for ranks in map(int, args.ranks.split(",")):
            hosts = TwoHosts()
            try:
                limit(hosts, rate, args.delay)
                bench = Bench(hosts, ranks, args)
                compute = statistics.median(bench.run("ours", "compute", args.steps)["step_ms"] for _ in range(args.rounds))
                for strategy in args.strategies.split(","):
                    arriving = {side: bench.bytes_per_step(side, strategy) for side in sides}
                    times = {side: [] for side in sides}
                    for round_ in range(args.rounds):
                        for side in sides if round_ % 2 == 0 else reversed(sides):
                            result = bench.run(side, strategy, args.steps)
                            times[side].append(result["step_ms"])
                    least = 0 if rate == "none" else NEEDED[strategy.split("-")[0]] * WIDTHS[strategy.partition("-")[2]] * result["parameters"] * 8e3 / bits_per_second(rate)
                    row = {"rate": rate, "ranks": f"2x{ranks}", "strategy": strategy, "compute_ms": compute, "least_ms": least}
                    for side in sides:
                        row |= {f"{side}_ms": statistics.median(times[side]), f"{side}_bytes": arriving[side]}
                    if len(sides) == 2:
                        row["ratio"] = statistics.median(a / b for a, b in zip(times["ours"], times["theirs"]))
                    rows.append(row)
                    print(f"{rate:8} {row['ranks']:6} {strategy:13} {compute:8.0f} {least:7.0f} {row['ours_ms']:8.0f} "
                          f"{row.get('theirs_ms', 0):8.0f} {row.get('ratio', 0):6.2f} {row['ours_bytes']:6.2f}P "
                          f"{row.get('theirs_bytes', 0):6.2f}P", flush=True)
            finally:
                hosts.remove()
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
