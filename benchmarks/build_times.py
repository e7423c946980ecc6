#!/usr/bin/env python3
"""Prints how long the last build of a Ninja build folder took, by folder of the sources.

    build_times.py [BUILD] [--top N]

BUILD   default: build. Its .ninja_log has the time of each output; of several builds the newest counts.
--top N also prints the N outputs that took longest. Default: 10.

Times are wall seconds of each command. They are close to CPU seconds where no more commands run at a time
than there are cores, and nothing else runs.
"""
import argparse
import collections
import pathlib
import re
import sys


def read(log):
    """The seconds of each command, by the first output that it made last."""
    lines = log.read_text().splitlines()
    if not lines or not lines[0].startswith("# ninja log"):
        sys.exit(f"build_times: {log}: expected a log of Ninja")
    newest = {}
    for line in lines[1:]:
        start, end, _, output, command = line.split("\t")
        if (log.parent / output).exists():  # an output of an earlier configuration does not
            newest[output] = (start, end, command)
    # A command with several outputs has a line for each.
    seconds, seen = {}, set()
    for output, (start, end, command) in newest.items():
        if (start, end, command) not in seen:
            seconds[output] = (int(end) - int(start)) / 1000
        seen.add((start, end, command))
    return seconds


def folder(output):
    if output.endswith(".gch"):
        return "precompiled headers"
    if not output.endswith(".o"):
        return "linking and the rest"
    return re.sub(r"/CMakeFiles/.*", "", output)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", nargs="?", default="build", type=pathlib.Path)
    parser.add_argument("--top", type=int, default=10)
    arguments = parser.parse_args()
    log = arguments.build / ".ninja_log"
    if not log.is_file():
        sys.exit(f"build_times: {log}: expected a build folder of Ninja that was built")
    seconds = read(log)
    sums, counts = collections.Counter(), collections.Counter()
    for output, took in seconds.items():
        sums[folder(output)] += took
        counts[folder(output)] += 1
    print(f"{'folder':<32}{'outputs':>8}{'seconds':>10}")
    for name, took in sums.most_common():
        print(f"{name:<32}{counts[name]:>8}{took:>10.1f}")
    print(f"{'sum':<32}{sum(counts.values()):>8}{sum(sums.values()):>10.1f}")
    print("\nlongest:")
    for output in sorted(seconds, key=seconds.get, reverse=True)[: arguments.top]:
        print(f"{seconds[output]:>10.1f}  {output}")


if __name__ == "__main__":
    main()
