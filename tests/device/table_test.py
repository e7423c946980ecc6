#!/usr/bin/env python3
"""Checks the tables of docs/devices.md against the tests of test_device.

    table_test.py TEST_DEVICE DEVICES_MD SOURCE...

SOURCE     the sources of test_device that run on any device, in test_cuda too

Each text of the table of parts must be in a name of a test, each parity test must have one of them
in its name, only tests that run on any device have passed on CUDA, and the most waits of a step
must be those that the parity tests allow.
"""
import re
import subprocess
import sys


def tests(binary):
    """Suite.name/case -> the comment behind it."""
    result, suite = {}, ""
    listed = subprocess.run([binary, "--gtest_list_tests"], capture_output=True, text=True,
                            check=True)
    for line in listed.stdout.splitlines():
        name, _, comment = line.partition("#")
        if not line.startswith(" "):
            suite = name.strip()
        else:
            result[suite + name.strip()] = comment.strip()
    return result


def suites_of(sources):
    """The test suites that these files define."""
    found = set()
    for source in sources:
        with open(source) as file:
            found.update(re.findall(r"^TEST(?:_[FP])?\((\w+),", file.read(), re.M))
    return found


def suite_of(test):
    return test.partition(".")[0].split("/")[-1]


def wrong_on_cuda(text, known, any_device):
    """Rows that have passed on CUDA, with tests that test_cuda does not have."""
    for part, names, *_, cuda in rows(text, "| part |"):
        for name in re.findall(r"`([^`]+)`", names):
            missing = {suite_of(test) for test in known if name in test} - any_device
            if cuda == "passed" and missing:
                yield f"{part}: passed on CUDA, and test_cuda has no {', '.join(sorted(missing))}"


def rows(text, title):
    """The cells of the table that begins with this title."""
    lines = text[text.index(title):].splitlines()[2:]
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def main():
    binary, page, *sources = sys.argv[1:]
    known = tests(binary)
    with open(page) as file:
        text = file.read()
    problems = []
    named = [name for row in rows(text, "| part |") for name in re.findall(r"`([^`]+)`", row[1])]
    for name in named:
        if not any(name in test for test in known):
            problems.append(f"no test has {name} in its name")
    parity = {test.split("/")[-1]: comment for test, comment in known.items()
              if "DeviceParity" in test}
    for case in parity:
        if not any(name in "/" + case for name in named if name != "DeviceParity"):
            problems.append(f"the case {case} is in no part")
    waits = {}
    for cases, most, _ in rows(text, "| case |"):
        for case in re.findall(r"`([^`]+)`", cases) or ["all others"]:
            waits[case] = most
    for case, comment in parity.items():
        allowed = re.search(r"at most (\S+) waits", comment)[1]
        expected = waits.get(case, waits["all others"])
        if allowed != expected:
            problems.append(f"{case} allows {allowed} waits, and the page says {expected}")
    problems += [f"no case {case}" for case in waits if case not in parity and case != "all others"]
    problems += wrong_on_cuda(text, known, suites_of(sources))
    print("\n".join(problems) or f"{len(named)} texts, {len(parity)} cases")
    sys.exit(len(problems) > 0)


if __name__ == "__main__":
    main()
