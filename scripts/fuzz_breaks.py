#!/usr/bin/env python3
"""Measures what the fuzzer of training finds: runs it on a library with deliberate mistakes.

    scripts/fuzz_breaks.py [--only NAME] [--seeds 1500] [--required 48] [--build build] [--jobs 2]
    scripts/fuzz_breaks.py --check

tests/fuzz/training/breaks.txt has the mistakes. All of them are made in the source tree at once,
each behind a look at the environment variable TESSERA_BREAK. Then build/bin/training_fuzz is built
once, and the sources are put back, whatever happens; the next build compiles them. The program runs
without a mistake, where it must find nothing, and then with the name of each mistake until its
first finding. Exit status 0: at least the required number of mistakes is found (with --only: all
that are named). --check only tests that each mistake still fits the source. Standard library only.
"""
import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from changed_sources import changed, chosen

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIELDS = ["name", "file", "old", "new", "what"]


class Break:
    def __init__(self, fields):
        self.name, self.file, old, self.new, self.what = (fields[field] for field in FIELDS)
        self.before, _, rest = old.partition("<<")
        self.inner, _, self.after = rest.rpartition(">>")

    def problem(self):
        text = (ROOT / self.file).read_text()
        count = text.count(self.before + self.inner + self.after)
        if not self.inner:
            return f"{self.name}: old has no text between << and >>"
        if count == 1:
            begun = text.partition(self.before + self.inner + self.after)[0] + self.before
            last = re.sub(r"//.*", "", begun).rstrip()
            if self.inner.endswith(";") and last.endswith((".", "->", "=", "(", ",", "return")):
                return f"{self.name}: what is between << and >> is a part of a statement"
            return None
        return f"{self.name}: the old text occurs {count} times in {self.file}; expected once"

    def made_in(self, text):
        """`text` with the mistake in place of what is right, when TESSERA_BREAK is its name."""
        condition = chosen(self.name)
        if self.inner.endswith(";"):
            code = f"{{ if ({condition}) {{ {self.new} }} else {{ {self.inner} }} }}"
        else:
            code = f"({condition} ? ({self.new}) : ({self.inner}))"
        return text.replace(self.before + self.inner + self.after, self.before + code + self.after)


def read_breaks(path):
    breaks = []
    for block in path.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if not lines:
            continue
        fields = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if list(fields) != FIELDS:
            found, expected = ", ".join(fields), ", ".join(FIELDS)
            sys.exit(f"{path}: a break has the fields {found}; expected {expected}")
        breaks.append(Break(fields))
    names = [each.name for each in breaks]
    problems = [problem for problem in (each.problem() for each in breaks) if problem]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems += [f"{name}: there are two breaks of this name" for name in twice]
    if problems:
        sys.exit("\n".join(problems))
    return breaks


def made(breaks):
    """The mistakes are in the source tree."""
    def change(path, text):
        for each in breaks:
            text = each.made_in(text) if ROOT / each.file == path else text
        return text
    return changed({ROOT / each.file for each in breaks}, change)


def fuzz(name, args):
    """The first finding as "seed 7, difference", or None."""
    program = [ROOT / args.build / "bin/training_fuzz", "--stop-at-first"]
    program += ["--seeds", str(args.seeds), "--jobs", str(args.jobs)]
    env = dict(os.environ, OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1", TESSERA_BREAK=name)
    env.pop("OPENBLAS_CORETYPE", None)
    done = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True)
    finding = re.search(r"^seed (\d+): ([a-z ]+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or bool(finding) != bool(done.returncode):
        sys.exit(f"training_fuzz: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return f"seed {finding[1]}, {finding[2]}" if finding else None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", action="append", help="this break; repeatable")
    parser.add_argument("--seeds", type=int, default=1500)
    parser.add_argument("--required", type=int, default=48)
    parser.add_argument("--build", default="build")
    parser.add_argument("--jobs", type=int, default=2, help="processes of the fuzzer")
    parser.add_argument("--check", action="store_true", help="only tests that the breaks fit")
    args = parser.parse_args()
    # sys.exit runs the finally blocks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    breaks = read_breaks(ROOT / "tests/fuzz/training/breaks.txt")
    if args.check:
        return 0
    if args.only:
        unknown = set(args.only) - {each.name for each in breaks}
        if unknown:
            sys.exit(f"there is no break {', '.join(sorted(unknown))}")
        breaks = [each for each in breaks if each.name in args.only]
    with made(breaks):
        build = ["ninja", "-C", args.build, "-j", "1", "training_fuzz"]
        done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit((done.stdout + done.stderr)[-4000:])
    unbroken = fuzz("", args)
    if unbroken:  # it would count as found for every break
        sys.exit(f"there is a finding without a break: {unbroken}")
    found = 0
    for each in breaks:
        begun = time.monotonic()
        finding = fuzz(each.name, args)
        found += finding is not None
        result = f"found: {finding}" if finding else "missed"
        print(f"{each.name:<28} {result:<32} {time.monotonic() - begun:6.1f} s", flush=True)
    print(f"{found} of {len(breaks)} breaks found in {args.seeds} seeds, nothing without a break")
    return 0 if found >= min(args.required, len(breaks)) else 1


if __name__ == "__main__":
    sys.exit(main())
