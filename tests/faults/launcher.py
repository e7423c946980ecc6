"""The launcher itself: killed, with wrong words, with ranks that do not end."""
import os, signal, time

from processes import is_running
from registry import fault
from trial import outcome

GROUP = "Launcher"


@fault(GROUP, "SIGKILL of the launcher", fast=True)
def killed(trial):
    run = trial.start_training("train.steps=1000000", "checkpoint.every=1000000")
    run.wait_for_line("step +3/")
    pids = [trial.rank_pid(rank) for rank in range(3)]
    start = time.monotonic()
    run.process.kill()
    while any(is_running(pid) for pid in pids):
        trial.check(time.monotonic() - start < 5, "ranks go on")
        time.sleep(0.01)
    seconds = time.monotonic() - start
    code = run.end()
    trial.nothing_runs()
    return outcome(seconds, "none", code, "no rank, no process, no temporary file")


def words(trial, *command, code, text, when=None, ranks="none", left="nothing", **options):
    start = time.monotonic()
    run = trial.start(trial.bin("tessera"), "run", *command, **options)
    actual = run.end()
    trial.check(actual == code, f"exit code {actual}", run)
    found = trial.find(run, text)
    ranks = found[1] if ranks is None else ranks
    trial.nothing_runs()
    return outcome(when or run.when(text) - start, ranks, code, left)


@fault(GROUP, "{what}", fast=True, cases=[dict(what=what, command=command, code=code, text=text) for what, command, code, text in (
    ("a program that does not exist", ["-n", 2, "/nowhere/program"], 127, "/nowhere/program"),
    ("a program that cannot be executed", ["-n", 2, "/etc/hostname"], 126, "/etc/hostname"),
    ("a flag that does not exist", ["--nproc-per-nod", 2, "true"], 2, "--nproc-per-node"),
    ("-n 0", ["-n", 0, "true"], 2, "0"), ("-n two", ["-n", "two", "true"], 2, "two"), ("no program", ["-n", 2], 2, "PROGRAM|program"),
    ("two hosts without a number and an address", ["--nnodes", 2, "-n", 1, "true"], 2, "--node-rank"),
    ("--nnodes 3:2", ["--nnodes", "3:2", "true"], 2, "MIN of at most MAX"),
    ("--rejoin-timeout on one host", ["--rejoin-timeout", 30, "--max-restarts", 1, "true"], 2, "several hosts"))])
def wrong_words(trial, what, command, code, text):
    return words(trial, *command, code=code, text=text, when="before the ranks")


@fault(GROUP, "ulimit -n too low for -n 64")
def few_files(trial):
    run = trial.start("bash", "-c", 'ulimit -n 60; exec "$@"', "bash", trial.bin("tessera"), "run", "-n", 64, "true")
    code = run.end()
    trial.check(code == 2, f"exit code {code}", run)
    trial.find(run, "ulimit -n")
    return outcome("before the ranks", "none", code, "nothing")


@fault(GROUP, "a rank fails; the others ignore SIGTERM", fast=True)
def deaf(trial):
    return words(trial, "-n", 3, "bash", "-c", 'if [ $RANK = 2 ]; then exit 9; fi; trap "" TERM; while :; do sleep 0.2; done', code=9,
                 text=r"root cause: rank (\d)", ranks=None, left="no process")


@fault(GROUP, "ranks end and leave processes of their own behind")
def grandchildren(trial):
    return words(trial, "-n", 2, "bash", "-c", "sleep 600 & echo started", code=0, text="started", when="at the end", left="no process")


@fault(GROUP, "the console of the launcher is a full disk")
def full_console(trial):
    run = trial.start("bash", "-c", 'exec "$@" >/dev/full', "bash", trial.bin("tessera"), "run", "-n", 2, trial.bin("fault_trainer"), "c.yaml")
    code = run.end()
    trial.check(code == 0, f"exit code {code}", run)
    trial.find(run, "No space left on device")
    trial.check(trial.weights() == trial.reference(ranks=2), "training gives other bits", run)
    return outcome("at the first line", "none", code, f"{trial.left()}; the same bits as undisturbed")


@fault(GROUP, "a second SIGINT more than a second after the first, with ranks that do not end")
def second_signal(trial):
    run = trial.start(trial.bin("tessera"), "run", "-n", 2, "bash", "-c", 'trap "" INT TERM; echo ready; while :; do sleep 0.2; done')
    run.wait_for(lambda: run.text().count("ready") == 2, 20, "both ranks are ready")
    os.kill(run.process.pid, signal.SIGINT)
    time.sleep(1.3)
    start = time.monotonic()
    os.kill(run.process.pid, signal.SIGINT)
    code = run.end()
    trial.check(code == 128 + signal.SIGINT, f"exit code {code}", run)
    return outcome(time.monotonic() - start, "none", code, "no process")
