#!/usr/bin/env python3
"""Compares Tessera with PyTorch: both programs run in turn; prints ratios of medians of rounds.

    compare.py --build build [--python python3] [--rounds 9] [--sizes A,B] [--json out.json]
    compare.py --build build --before OTHER_BUILD [--rounds 5]    two builds of ours, without PyTorch

PyTorch is that of the interpreter given by --python: Debian's python3-torch, or a virtual
environment with a newer one. Its fused optimizers are used where it has them (2.4 and newer). Both
sides run one rank per core, with OMP_NUM_THREADS=1 and without OPENBLAS_CORETYPE.
"""
import argparse, json, os, pathlib, statistics, subprocess, sys

SIZES = {"A": "384 6 6 128 256 4 12".split(), "B": "768 6 12 64 256 1 12".split()}
# Comparison: our strategy, the other one, the figure, the target ratio by size. The other strategy
# is PyTorch's, with an f appended where that PyTorch has fused optimizers; "own:" marks ours.
TARGETS = {
    "ZeRO step / PyTorch ZeRO (bucket views, best optimizer)": ("zero", "zerov", "step_ms", {"B": 0.60, "A": 0.90}),
    "DDP step / PyTorch DDP (best optimizer)": ("ddp", "ddp", "step_ms", {"B": 0.75, "A": 1.00}),
    "ZeRO step / own compute only": ("zero", "own:compute", "step_ms", {"B": 1.40, "A": 1.10}),
    "FSDP step / PyTorch FSDP (best optimizer)": ("fsdp", "fsdp", "step_ms", {"B": 0.35, "A": 0.65}),
    "FSDP step / own ZeRO": ("fsdp", "own:zero", "step_ms", {"B": 1.25, "A": 1.10}),
    "ZeRO step with share_parameters / own ZeRO": ("zero-shared", "own:zero", "step_ms", {"B": 0.92}),
    "ZeRO PSS with share_parameters / own ZeRO": ("zero-shared", "own:zero", "pss_mib", {}),
    "ZeRO peak RSS / PyTorch ZeRO": ("zero", "zerov", "peak_rss_mib", {"B": 0.85}),
    "ZeRO PSS / PyTorch ZeRO": ("zero", "zerov", "pss_mib", {}),
}


def run(command):
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    env.update(OMP_NUM_THREADS="1", USE_LIBUV="0")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(lines[-1])


BEFORE = {  # with --before: the same program of two builds
    f"{name} {label}, this build / the other": (name, "before:" + name, figure, {})
    for name in ("zero", "ddp", "fsdp") for label, figure in (("step", "step_ms"),
                                                              ("peak RSS", "peak_rss_mib"))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--python", default="/usr/bin/python3")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default="A,B")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--before", metavar="BUILD",
                        help="compare with this other build of ours instead of PyTorch")
    parser.add_argument("--json")
    args = parser.parse_args()
    here = pathlib.Path(__file__).parent
    binaries = pathlib.Path(args.build) / "bin"
    version = subprocess.run([args.python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True).stdout.strip()
    fused = "f" if tuple(int(n) for n in version.split("+")[0].split(".")[:2]) >= (2, 4) else ""

    def command(who, size):
        if who.startswith("before:"):
            other = pathlib.Path(args.before) / "bin"
            return [str(other / "tessera"), "run", "-n", args.ranks, str(other / "peer_twin"), who[7:], *SIZES[size]]
        if who.startswith("own:"):
            return [str(binaries / "tessera"), "run", "-n", args.ranks, str(binaries / "peer_twin"), who[4:], *SIZES[size]]
        return [args.python, str(here / "torch_peer.py"), who + fused, args.ranks, *SIZES[size]]

    # PyTorch's FSDP runs on CPUs from 2.x on.
    comparisons = {what: pair for what, pair in TARGETS.items() if fused or pair[1] != "fsdp"}
    if args.before:
        comparisons, version = BEFORE, "not used"
    rows = []
    for size in args.sizes.split(","):
        sides = []
        for ours, theirs, _, _ in comparisons.values():
            for who in ("own:" + ours, theirs):
                if who not in sides:
                    sides.append(who)
        results = {who: [] for who in sides}
        for round_ in range(args.rounds):
            for who in sides if round_ % 2 == 0 else reversed(sides):
                results[who].append(run(command(who, size)))
        for what, (ours, theirs, figure, targets) in comparisons.items():
            a = [r[figure] for r in results["own:" + ours]]
            b = [r[figure] for r in results[theirs]]
            rows.append({"what": what, "size": size, "peer": version, "ours": statistics.median(a), "theirs": statistics.median(b),
                         "ratio": statistics.median(x / y for x, y in zip(a, b)), "min": min(x / y for x, y in zip(a, b)),
                         "max": max(x / y for x, y in zip(a, b)), "target": targets.get(size), "rounds": args.rounds})
    print(f"PyTorch {version}, {args.ranks} ranks, medians of {args.rounds} interleaved rounds")
    print(f"{'what':58} {'size':4} {'ours':>9} {'theirs':>9} {'ratio':>6} {'min':>5} {'max':>5} {'target':>6}")
    for row in rows:
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        print(f"{row['what']:58} {row['size']:4} {row['ours']:9.1f} {row['theirs']:9.1f} {row['ratio']:6.2f} {row['min']:5.2f} {row['max']:5.2f} {target:>6}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
