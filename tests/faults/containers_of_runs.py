"""Training in what containers do to a process: a killed rank is named, and the restarted run has the bits of one outside."""
import errno, os, platform

from containers import CALLS, NOBODY, refuse, surroundings, why_not
from registry import CannotTry, fault
from trial import AT, hook, outcome

GROUP = "Containers"


def train_and_kill(trial, **options):
    run = trial.train(hook(do="signal", value=9, at=AT, rank=1, once="once"), flags=["--max-restarts", 1, "--restart-delay", 0.1], **options)
    trial.check(trial.weights() == trial.reference(), "training there gives other bits", run)
    return outcome(run.when("was killed by SIGKILL") - trial.fault_at(run), trial.named(run, r"root cause: rank (\d+)"), 0,
                   f"{trial.left()}; the same bits as undisturbed outside")


@fault(GROUP, "{name} refused, and SIGKILL of a rank", cases=[dict(name=name) for name in [*CALLS, "all of these"]])
def refused(trial, name):
    if platform.machine() != "x86_64":
        raise CannotTry("the numbers of system calls are those of x86_64")
    return train_and_kill(trial, preexec_fn=lambda: refuse(list(CALLS) if name == "all of these" else [name], errno.ENOSYS))


@fault(GROUP, "in {name}, SIGKILL of a rank", fast=True, cases=[dict(name=name) for name in surroundings("")])
def surrounded(trial, name):
    front = surroundings(trial.folder)[name]
    reason = why_not(front, "test", "-x", trial.bin("tessera"))
    if reason:
        raise CannotTry(reason)
    if name == "another user":
        for path in [trial.folder, *trial.folder.iterdir()]:
            os.chown(path, NOBODY, NOBODY)
    return train_and_kill(trial, front=front)
