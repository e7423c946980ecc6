#!/usr/bin/env python3
"""Compares what a rank moves to another host with iperf3, over a cable without a limit.

    streams.py --build build [--rounds 5] [--streams 1,2,4]

Two hosts (network namespaces; root) with one rank each. In turn: an all-reduce and an all-gather of 64
MiB, in which both hosts send at once, and iperf3 in both directions at once with these numbers of
streams. Prints medians in Gbit/s that one host sends. Needs iperf3.
"""
import argparse, json, pathlib, statistics, subprocess, sys, time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/harness"))
from hosts import PORTS, environment, finish
from two_hosts import ADDRESSES, TwoHosts


def start(hosts, host, *words):
    return subprocess.Popen(hosts.command(host, *words), env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ours(hosts, build):
    bin, port = pathlib.Path(build).resolve() / "bin", next(PORTS)
    return finish([start(hosts, host, bin / "tessera", "run", "--nnodes", 2, "--node-rank", host, "-n", 1, "--master-addr", ADDRESSES[0],
                         "--master-port", port, bin / "bench_streams") for host in range(2)])


def iperf3(hosts, streams):
    port = next(PORTS)
    server = start(hosts, 1, "iperf3", "--server", "--one-off", "--port", port)
    time.sleep(0.5)
    client = start(hosts, 0, "iperf3", "--client", ADDRESSES[1], "--port", port, "--time", 4, "--parallel", streams, "--bidir", "--json")
    try:
        ends = json.loads(client.communicate(timeout=60)[0])["end"]
    finally:
        client.kill()
        server.kill()
    return (ends["sum_received"]["bits_per_second"] + ends["sum_received_bidir_reverse"]["bits_per_second"]) / 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", default="1,2,4")
    args = parser.parse_args()
    rates = {}
    hosts = TwoHosts()
    try:
        for _ in range(args.rounds):
            for name, rate in ours(hosts, args.build).items():
                rates.setdefault(name, []).append(rate)
            for streams in args.streams.split(","):
                rates.setdefault(f"iperf3, {streams} streams", []).append(iperf3(hosts, streams))
    finally:
        hosts.remove()
    for name, each in rates.items():
        print(f"{name:20} {statistics.median(each) / 1e9:6.1f} Gbit/s each way ({min(each) / 1e9:.1f} to {max(each) / 1e9:.1f})")


if __name__ == "__main__":
    main()
