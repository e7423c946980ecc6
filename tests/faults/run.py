#!/usr/bin/env python3
"""Tries the faults of the registry with real processes and writes the table of what was measured.

    run.py BUILD [--write FILE] [--check FILE] [--missing] [--fast] [--jobs N] [--list] [WORD …]

WORD: only the faults whose group or name contains one of the words. --write: writes the page. Faults that were not
chosen keep the rows that it has; one that does not hold has none, and --missing tries those without a row. --check: the file must have
exactly the rows of the registry, and the rows that were tried must be as measured, except for times.
"""
import argparse, concurrent.futures, pathlib, sys, time, traceback

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import table
from registry import FAULTS, CannotTry
from trial import References, Trial

import checkpoints_and_disks, containers_of_runs, data, drift, file_operations, launcher, not_finite, operations, processes_and_signals, ranks_that_differ  # noqa
import several_hosts, start_up  # noqa


def attempt(fault, build, references):
    """(state, outcome or reason, seconds): state is held, failed or not tried."""
    start = time.monotonic()
    trial = Trial(build, references)
    try:
        outcome = fault.function(trial, **fault.arguments)
        trial.nothing_runs()
        seconds = time.monotonic() - start
        if seconds > fault.bound:
            return "failed", f"took {seconds:.0f} s, expected at most {fault.bound} s", seconds
        return "held", outcome, seconds
    except CannotTry as reason:
        return "not tried", str(reason), time.monotonic() - start
    except Exception:
        return "failed", traceback.format_exc(), time.monotonic() - start
    finally:
        trial.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--write", type=pathlib.Path)
    parser.add_argument("--check", type=pathlib.Path)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("words", nargs="*")
    options = parser.parse_intermixed_args()
    chosen = [fault for fault in FAULTS if (fault.fast or not options.fast)
              and (not options.words or any(word.lower() in f"{fault.group}: {fault.name}".lower() for word in options.words))]
    if options.missing:
        known = table.read(options.write.read_text())
        chosen = [fault for fault in chosen if (fault.group, fault.name) not in known]
    if options.list:
        print("\n".join(f"{fault.group}: {fault.name}" for fault in chosen))
        return 0
    if not chosen:
        print(f"run.py: no fault has {options.words} in its name; --list prints the names", file=sys.stderr)
        return 2
    start, results, references = time.monotonic(), {}, References()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        pending = {pool.submit(attempt, fault, options.build.resolve(), references): fault for fault in chosen}
        try:
            for future in concurrent.futures.as_completed(pending):
                fault = pending[future]
                state, result, seconds = results[fault.group, fault.name] = future.result()
                text = " | ".join(table.cells_of(result)) if state == "held" else result
                print(f"{state:9} {seconds:5.1f} s  {fault.group}: {fault.name}: {text}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    count = {state: sum(result[0] == state for result in results.values()) for state in ("held", "failed", "not tried")}
    print(f"{count['held']} of {len(chosen)} faults held in {time.monotonic() - start:.0f} s; {count['failed']} failed, {count['not tried']} could not be tried here")
    problems = [] if count["failed"] == 0 else ["a fault did not hold"]
    measured = {key: result[1] for key, result in results.items() if result[0] == "held"}
    if options.check:
        problems += table.differences(options.check.read_text(), FAULTS, measured)
    if options.write:
        tried = {(fault.group, fault.name) for fault in chosen}
        rows = {key: cells for key, cells in (table.read(options.write.read_text()) if options.write.exists() else {}).items() if key not in tried}
        rows.update({key: table.cells_of(outcome) for key, outcome in measured.items()})
        options.write.write_text(table.page(FAULTS, rows))
        if not all((fault.group, fault.name) in rows for fault in FAULTS):
            problems.append(f"{options.write} lacks faults, because they could not be tried or did not hold")
    for problem in problems:
        print(f"run.py: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
