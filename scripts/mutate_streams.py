#!/usr/bin/env python3
"""Removes each wait, event, guard and record of use of a device's streams from src/, one at a time,
and checks that the tests on the simulated device notice.

    mutate_streams.py BUILD [--list] [--only TEXT] [--repeat N]

BUILD      a configured build folder of this source tree. It is built again for each change.
--list     prints the places and ends.
--only     takes the places whose file, line or text contains TEXT.
--repeat   runs of the tests for a change that is not noticed at first (default 3). The first one
           has the tests' usual seeds, the others share the next seeds, up to number 20.

The tests must pass on the sources as they are, or the script ends with an error. It prints one line
for each place: noticed, with the first test that failed or "time-out", NOT NOTICED, or DOES NOT
COMPILE. The status is the number of places that were not noticed or do not compile. A file is
changed while its place is tried, and restored, also after an interrupt.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys

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


def without(text, number):
    """The text without the statement that begins in this line, or the line without its condition or
    its call."""
    lines = text.splitlines()
    if CONDITION.search(lines[number]):
        lines[number] = CONDITION.sub("true", lines[number])
        return "\n".join(lines) + "\n"
    if not STATEMENT.search(lines[number]):
        lines[number] = CALL.sub(r"static_cast<void>(\1);", lines[number])
        return "\n".join(lines) + "\n"
    end = number
    while not lines[end].rstrip().endswith(";"):
        end += 1
    lines[number:end + 1] = [""] * (end + 1 - number)
    return "\n".join(lines) + "\n"


def compiles(build):
    made = subprocess.run(["cmake", "--build", build, "--target", "test_device"],
                          capture_output=True, text=True)
    return made.returncode == 0


def seeds_of(run, repeat):
    """The variable for the tests' seeds in this run; the first run has the usual ones."""
    if run == 0:
        return {}
    left = ALL_SEEDS - FIRST_SEEDS
    begin, end = (left * part // (repeat - 1) for part in (run - 1, run))
    return {"TESSERA_TEST_SEEDS": f"{FIRST_SEEDS + 1 + begin}:{max(end - begin, 1)}"}


def failure(build, seeds):
    """The first test that fails, or None."""
    try:
        tests = subprocess.run([build / "bin/test_device", "--gtest_fail_fast"], cwd=build,
                               capture_output=True, text=True, timeout=SECONDS,
                               env={**os.environ, **seeds})
    except subprocess.TimeoutExpired:
        return "time-out"
    if tests.returncode == 0:
        return None
    failed = re.search(r"^\[  FAILED  \] (\S+)", tests.stdout, re.M)
    return failed[1].rstrip(",") if failed else f"status {tests.returncode}"


def attempt(build, file, number, repeat):
    """Whether the change is noticed, and how."""
    path = SOURCE / file
    original = path.read_text()
    try:
        path.write_text(without(original, number))
        if not compiles(build):
            return False, "DOES NOT COMPILE"
        for run in range(repeat):
            if failed := failure(build, seeds_of(run, repeat)):
                return True, f"noticed by {failed}"
        return False, "NOT NOTICED"
    finally:
        path.write_text(original)


def check_unmodified(build):
    if not compiles(build):
        sys.exit("mutate_streams.py: the sources as they are do not compile")
    if failed := failure(build, {}):
        sys.exit(f"mutate_streams.py: the tests fail on the sources as they are: {failed}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    build = options.build.resolve()
    chosen = [(file, number, f"{file}:{number + 1}: {text}") for file, number, text in places()]
    chosen = [place for place in chosen if options.only in place[2]]
    if options.list:
        print("\n".join(place for _, _, place in chosen))
        return
    check_unmodified(build)
    unnoticed = 0
    for file, number, place in chosen:
        noticed, result = attempt(build, file, number, options.repeat)
        unnoticed += not noticed
        print(f"{place}\n    {result}", flush=True)
    sys.exit(unnoticed)


if __name__ == "__main__":
    main()
