#!/usr/bin/env python3
"""Compares Tessera inside a program with MPI with one MPI_Allreduce a parameter, the way by hand.

    mpi.py --build build [--rounds 5] [--sizes A,B] [--hosts 1,2] [--rate none] [--strategies zero,ddp]

Both sides are peer_twin_mpi under Open MPI, with one rank a core on one host, or one rank on each of
two hosts, which are network namespaces (root). They run in turn. tune_process is off, as it is by
default. By hand, the optimizer is libtorch's Adam, with its whole state on every rank. Prints medians
of a step in milliseconds, of the peak memory of rank 0 in MiB, and of the bytes that arrive at host 0
in a run, with their ratios.
"""
import argparse, json, os, pathlib, statistics, subprocess, sys, tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/harness"))
from compare import SIZES
from hosts import arrived, environment, limit
from two_hosts import ADDRESSES, SECOND_ADDRESS, TwoHosts, ip

FIGURES = {"step_ms": "ms", "peak_rss_mib": "MiB", "arrived_mib": "MiB in"}
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def command(hosts, folder, program):
    if hosts is None:
        return ["mpirun.openmpi", "--oversubscribe", "-n", "2", *program]
    return hosts.mpirun("mpirun.openmpi", "--mca", "plm_rsh_agent", hosts.rsh_agent(folder), "--mca", "btl_tcp_if_include",
                        "192.0.2.0/24", "--host", ",".join(address + ":1" for address in ADDRESSES), "-n", "2", *program)


def run(hosts, folder, program):
    before = arrived(hosts) if hosts else 0
    done = subprocess.run([str(word) for word in command(hosts, folder, program)], stdin=subprocess.DEVNULL, text=True,
                          capture_output=True, timeout=600, env=environment(TUNE_PROCESS="0", **ROOT))
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(map(str, program))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(lines[-1]) | {"arrived_mib": (arrived(hosts) - before) / 2**20 if hosts else 0}


def compare(hosts, size, strategies, args):
    sides = ["allreduce", *strategies]
    results = {side: [] for side in sides}
    program = pathlib.Path(args.build).resolve() / "bin/peer_twin_mpi"
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(args.rounds):
            for side in sides if round_ % 2 == 0 else reversed(sides):
                results[side].append(run(hosts, folder, [program, side, *SIZES[size]]))
    for side in strategies:
        for figure, unit in FIGURES.items():
            ours, by_hand = ([result[figure] for result in results[name]] for name in (side, "allreduce"))
            if not all(by_hand):
                continue
            ratio = statistics.median(a / b for a, b in zip(ours, by_hand))
            print(f"{2 if hosts else 1:5} {size:4} {side:10} {unit:7} {statistics.median(ours):9.1f} "
                  f"{statistics.median(by_hand):9.1f} {ratio:6.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="A,B")
    parser.add_argument("--hosts", default="1,2")
    parser.add_argument("--rate", default="none", help="between two hosts, as tc writes it")
    parser.add_argument("--strategies", default="zero,ddp")
    args = parser.parse_args()
    print(f"hosts size strategy   figure       ours   by hand  ratio   (medians of {args.rounds} interleaved rounds)", flush=True)
    for size in args.sizes.split(","):
        for count in args.hosts.split(","):
            hosts = TwoHosts() if count == "2" else None
            try:
                if hosts:
                    ip("-n", hosts.names[0], "address", "del", SECOND_ADDRESS + "/24", "dev", hosts.cables[0])
                    limit(hosts, args.rate, None)
                compare(hosts, size, args.strategies.split(","), args)
            finally:
                if hosts:
                    hosts.remove()


if __name__ == "__main__":
    main()
