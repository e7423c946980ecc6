#!/usr/bin/env python3
"""Removes each wait, event, guard and record of use of a device's streams from src/, one at a time,
and checks that the tests on the simulated device notice.

    mutate_streams.py BUILD [--list] [--only TEXT] [--repeat N]

BUILD      a configured build folder of this source tree. It is built again for each change.
--list     prints the places and ends.
--only     takes the places whose file, line or text contains TEXT.
--repeat   runs of the tests for a change that is not noticed at first (default 3). Delays of streams
           depend on the seeds of a test, but the order of threads differs from run to run.

Prints one line for each place: noticed, with the first test that failed, or NOT NOTICED. The status
is the number of places that were not noticed. A file is changed while its place is tried, and
restored, also after an interrupt.
"""
import argparse
import pathlib
import re
import subprocess
import sys

SOURCE = pathlib.Path(__file__).resolve().parent.parent
FILES = ("src/comm/base/comm_stream.h", "src/comm/device/device_transport.cpp",
         "src/comm/device/pinned_buffers.cpp",
         "src/comm/group/process_group_device.cpp", "src/comm/group/process_group_impl.cpp",
         "src/fsdp/residency.cpp", "src/fsdp/gradients.cpp", "src/train/run/run_prepare.cpp")
PLACE = re.compile(r"event\.block\(|mark->block\(|switched_\.emplace|stream\.keep\(|DeviceGuard there"
                   r"|stream_\.join\(|work->wait\(\);|^ *drain\(\);|CommStream::Scope on_"
                   r"|StreamGuard same|\.sent = std::move|on_device_\.reset_device"
                   r"|stream_\.wait_for_current\(|heartbeats_ = std::make_unique")


def places():
    for file in FILES:
        for number, line in enumerate((SOURCE / file).read_text().splitlines()):
            if PLACE.search(line):
                yield file, number, line.strip()


def without(text, number):
    """The text without the statement that begins in this line."""
    lines = text.splitlines()
    end = number
    while not lines[end].rstrip().endswith(";"):
        end += 1
    lines[number:end + 1] = [""] * (end + 1 - number)
    return "\n".join(lines) + "\n"


def failure(build):
    """The first test that fails, or None."""
    tests = subprocess.run([build / "bin/test_device", "--gtest_fail_fast"], cwd=build,
                           capture_output=True, text=True, timeout=1200)
    if tests.returncode == 0:
        return None
    failed = re.search(r"^\[  FAILED  \] (\S+)", tests.stdout, re.M)
    return failed[1].rstrip(",") if failed else f"status {tests.returncode}"


def attempt(build, file, number, repeat):
    path = SOURCE / file
    original = path.read_text()
    try:
        path.write_text(without(original, number))
        made = subprocess.run(["cmake", "--build", build, "--target", "test_device"],
                              capture_output=True, text=True)
        if made.returncode != 0:
            return "does not compile"
        for _ in range(repeat):
            if failed := failure(build):
                return f"noticed by {failed}"
        return None
    finally:
        path.write_text(original)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    unnoticed = 0
    for file, number, text in places():
        place = f"{file}:{number + 1}: {text}"
        if options.only not in place:
            continue
        if options.list:
            print(place)
            continue
        result = attempt(options.build.resolve(), file, number, options.repeat)
        unnoticed += result is None
        print(f"{place}\n    {result or 'NOT NOTICED'}", flush=True)
    sys.exit(unnoticed)


if __name__ == "__main__":
    main()
