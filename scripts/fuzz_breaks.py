#!/usr/bin/env python3
"""Measures what the fuzzer of training finds: makes deliberate mistakes in the library, one after the other.

    scripts/fuzz_breaks.py [--only NAME] [--seeds 1500] [--required 30] [--build build] [--jobs 2]

tests/fuzz/training/breaks.txt has the mistakes. Each is made in the source tree, build/bin/training_fuzz is built and run until its first
finding, and the source is put back. At the end the program is built and run without mistakes. Exit status 0: it then finds nothing, and it
has found at least the required number of mistakes (with --only, that mistake). Standard library only.
"""
import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIELDS = ("name", "file", "old", "new", "what")


def read_breaks(path):
    """The breaks of the file as dictionaries, checked: every field is there, and the old text occurs once."""
    breaks, problems = [], []
    for block in path.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if not lines:
            continue
        entry = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if tuple(entry) != FIELDS:
            sys.exit(f"{path}: a break has the fields {', '.join(entry)}; expected {', '.join(FIELDS)}")
        count = (ROOT / entry["file"]).read_text().count(entry["old"])
        if count != 1:
            problems.append(f"{entry['name']}: the old text occurs {count} times in {entry['file']}; expected once")
        breaks.append(entry)
    names = [entry["name"] for entry in breaks]
    problems += [f"{name}: there are two breaks of this name" for name in sorted(set(names)) if names.count(name) > 1]
    if problems:
        sys.exit("\n".join(problems))
    return breaks


def build(folder):
    """None, or the end of the compiler's messages."""
    done = subprocess.run(["ninja", "-C", folder, "-j", "1", "training_fuzz"], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode == 0 else (done.stdout + done.stderr)[-2000:]


def fuzz(folder, seeds, jobs):
    """The first finding as (seed, kind), or None."""
    program = [ROOT / folder / "bin/training_fuzz", "--stop-at-first", "--seeds", str(seeds), "--jobs", str(jobs)]
    env = dict(os.environ, OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    env.pop("OPENBLAS_CORETYPE", None)
    done = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True)
    finding = re.search(r"^seed (\d+): ([a-z ]+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or bool(finding) != bool(done.returncode):
        sys.exit(f"training_fuzz: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return (int(finding[1]), finding[2]) if finding else None


def try_break(entry, args):
    """Whether the fuzzer finds the break."""
    path = ROOT / entry["file"]
    original = path.read_text()
    begun = time.monotonic()
    try:
        path.write_text(original.replace(entry["old"], entry["new"]))
        problem = build(args.build)
        if problem:
            sys.exit(f"{entry['name']}: does not compile\n{problem}")
        compiled = time.monotonic()
        finding = fuzz(args.build, args.seeds, args.jobs)
    finally:
        path.write_text(original)
    result = f"found: seed {finding[0]}, {finding[1]}" if finding else "missed"
    print(f"{entry['name']:<28} {result:<32} {time.monotonic() - compiled:6.1f} s after {compiled - begun:.0f} s of compilation", flush=True)
    return finding is not None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", action="append", help="this break only; may be repeated")
    parser.add_argument("--seeds", type=int, default=1500)
    parser.add_argument("--required", type=int, default=30)
    parser.add_argument("--build", default="build")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # runs the finally blocks
    breaks = read_breaks(ROOT / "tests/fuzz/training/breaks.txt")
    if args.only:
        unknown = set(args.only) - {entry["name"] for entry in breaks}
        if unknown:
            sys.exit(f"there is no break {', '.join(sorted(unknown))}")
        breaks = [entry for entry in breaks if entry["name"] in args.only]
    found = 0
    try:
        for entry in breaks:
            found += try_break(entry, args)
    finally:
        problem = build(args.build)  # without the breaks
    if problem:
        sys.exit(problem)
    unbroken = fuzz(args.build, args.seeds, args.jobs)
    print(f"{found} of {len(breaks)} found; without breaks " + (f"seed {unbroken[0]}: {unbroken[1]}" if unbroken else f"{args.seeds} seeds find nothing"))
    return 0 if found >= min(args.required, len(breaks)) and not unbroken else 1


if __name__ == "__main__":
    sys.exit(main())
