"""The list of faults. Each is a function that tries it with real processes, checks what must hold, and returns what it measured."""
import dataclasses

GROUPS = ["Processes and signals", "Ranks that differ", "Values that are not finite", "Drift between replicas", "Checkpoints and disks", "Data",
          "Start-up and rendezvous", "Several hosts", "Operations", "Containers", "Launcher"]
FAULTS = []


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The cells of a row. `when` is a class of times, so that a repetition gives the same text."""
    when: str
    ranks: str
    code: str
    left: str


@dataclasses.dataclass(frozen=True)
class Fault:
    group: str
    name: str
    function: object
    arguments: dict
    fast: bool  # belongs to the part that `make test` runs
    bound: float  # seconds; each wait of a trial has a limit of its own, too


class CannotTry(Exception):
    """This machine lacks what the fault needs."""


def fault(group, name, cases=({},), fast=False, bound=300):
    """Registers `function(trial, **case)` for each case. `name` has the case's values in braces. With `fast`, the first case alone is fast."""
    assert group in GROUPS, group

    def register(function):
        for number, case in enumerate(cases):
            text = name.format(**case)
            assert all(known.name != text for known in FAULTS if known.group == group), text
            FAULTS.append(Fault(group, text, function, dict(case), fast and number == 0, bound))
        return function
    return register


def within(seconds):
    """The class of a time that was measured."""
    for limit in (0.5, 2, 5, 10, 30):
        if seconds < limit:
            return f"< {limit:g} s"
    raise AssertionError(f"detected after {seconds:.1f} s")
