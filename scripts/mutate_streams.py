#!/usr/bin/env python3
"""Leaves out each wait, event, guard and record of use of a device's streams in src/, one at a time,
and checks that the tests on the simulated device notice.

    mutate_streams.py BUILD [--list] [--only TEXT] [--repeat N] [--jobs N]

BUILD      a configured build folder of this source tree. The next build compiles the sources again.
--list     prints the places and ends.
--only     takes the places whose file, line or text contains TEXT.
--repeat   runs of the tests for a place that is not noticed at first (default 3). The first one
           has the tests' usual seeds, the others share the next seeds, up to number 20.
--jobs     places that are tried at a time (default: one for each core).

All places are changed in the source tree at once, each behind a look at the environment variable
TESSERA_BREAK. Then the tests are built once, and the sources are put back, whatever happens. The
tests must pass without a place, or the script ends with an error. It prints two lines for each
place: noticed, with the first test that failed or "time-out", or NOT NOTICED. The status is the
number of places that were not noticed.
"""
import argparse
import concurrent.futures
import functools
import os
import pathlib
import re
import subprocess
import sys

from changed_sources import changed, chosen

SOURCE = pathlib.Path(__file__).resolve().parent.parent
# A statement that begins in a line with this text is removed.
STATEMENT = re.compile(
    r"mark->block\(|switched_\.emplace|stream\.keep\(|stream_\.join\(|work->wait\(\);|executor\(\)\.drain\(\);"
    r"|CommStream::Scope on_|StreamGuard same|\.sent = std::move|on_device_\.reset_device"
    r"|stream_\.wait_for_current\(|liveness_ = std::make_unique|(event|sent|read)->record\("
    r"|set_last\(stream|while \(buffer\.sent|while \(!read_all\(")
# What is read counts as true.
CONDITION = re.compile(r"!(buffer\.sent|sent\.read|copied) \|\| \1->query\(\)")
# A wrapper's wait for a collective, which is removed from its line.
CALL = re.compile(r"((\w+(\.|->))*\b(work|works\[\w+\]|sum))\.wait\(\);")
# A guard, which is an object of a scope.
GUARD = re.compile(r"const ((?:\w+::)+\w+) (\w+)\((.*)\);")
# They wait for nothing of a device.
NO_STREAMS = ("src/zero/early_reduction.cpp", "src/zero/shards/")
FIRST_SEEDS, ALL_SEEDS = 3, 20
SECONDS = 1200  # of one run of the tests


def files():
    paths = [path for ending in ("*.h", "*.cpp") for path in (SOURCE / "src").rglob(ending)]
    names = sorted(str(path.relative_to(SOURCE)) for path in paths)
    return [name for name in names if not name.startswith(NO_STREAMS)]


def places():
    for file in files():
        for number, line in enumerate((SOURCE / file).read_text().splitlines()):
            if STATEMENT.search(line) or CONDITION.search(line) or CALL.search(line):
                yield file, number, line.strip()


def without(line, place):
    """The line, which does nothing where TESSERA_BREAK is this place."""
    if CONDITION.search(line):
        return CONDITION.sub(lambda found: f"{chosen(place)} || {found[0]}", line)
    if not STATEMENT.search(line):
        return CALL.sub(lambda found: f"({chosen(place)} ? void() : void({found[1]}.wait()));", line)
    if guard := GUARD.search(line):
        kind, name, arguments = guard.groups()
        return f"std::optional<{kind}> {name}; if (!{chosen(place)}) {name}.emplace({arguments});"
    return f"if (!{chosen(place)}) {line}"


def change(tried, path, text):
    lines = text.splitlines()
    for place, (file, number, _) in enumerate(tried):
        if SOURCE / file == path:
            lines[number] = without(lines[number], place)
    return "\n".join(lines) + "\n"


def seeds_of(run, repeat):
    """The variable for the tests' seeds in this run; the first run has the usual ones."""
    if run == 0:
        return {}
    left = ALL_SEEDS - FIRST_SEEDS
    begin, end = (left * part // (repeat - 1) for part in (run - 1, run))
    return {"TESSERA_TEST_SEEDS": f"{FIRST_SEEDS + 1 + begin}:{max(end - begin, 1)}"}


def failure(build, **variables):
    """The first test that fails, or None."""
    try:
        tests = subprocess.run([build / "bin/test_device", "--gtest_fail_fast"], cwd=build,
                               capture_output=True, text=True, timeout=SECONDS,
                               env={**os.environ, **variables})
    except subprocess.TimeoutExpired:
        return "time-out"
    if tests.returncode == 0:
        return None
    failed = re.search(r"^\[  FAILED  \] (\S+)", tests.stdout, re.M)
    return failed[1].rstrip(",") if failed else f"status {tests.returncode}"


def attempt(build, place, repeat):
    """The first test that notices the place, or None."""
    for run in range(repeat):
        if failed := failure(build, TESSERA_BREAK=str(place), **seeds_of(run, repeat)):
            return failed
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    build = options.build.resolve()
    tried = [(file, number, f"{file}:{number + 1}: {text}") for file, number, text in places()]
    tried = [place for place in tried if options.only in place[2]]
    if options.list:
        print("\n".join(place for _, _, place in tried))
        return
    with changed({SOURCE / file for file, _, _ in tried}, functools.partial(change, tried)):
        made = subprocess.run(["cmake", "--build", build, "--target", "test_device"],
                              capture_output=True, text=True)
    if made.returncode:
        sys.exit(made.stdout[-4000:] + made.stderr)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        # As many at a time as below: a test that a busy machine fails would count as one that notices.
        for failed in pool.map(lambda _: failure(build), range(options.jobs)):
            if failed:
                sys.exit(f"mutate_streams.py: a test fails where no place is left out: {failed}")
        attempts = [pool.submit(attempt, build, place, options.repeat) for place in range(len(tried))]
        for (_, _, place), ended in zip(tried, attempts):
            failed = ended.result()
            print(f"{place}\n    {f'noticed by {failed}' if failed else 'NOT NOTICED'}", flush=True)
    sys.exit(sum(ended.result() is None for ended in attempts))


if __name__ == "__main__":
    main()
