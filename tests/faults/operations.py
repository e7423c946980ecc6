"""Runs that make no progress, that run out of memory, or that could not save at their end."""
import os, re, struct, time

from data import GPT2
from registry import fault
from trial import AT, hook, outcome

GROUP = "Operations"


@fault(GROUP, "a rank hangs in a step", fast=True)
def hangs(trial):
    run = trial.train(hook(do="late", value=600_000, at=AT, rank=1), "train.watchdog={least: 2, other: 2}", "parallel.timeout=60", code=3)
    trial.find(run, r"rank 0: it is in \w+ #\d+ .*it waits for rank 1")
    trial.find(run, r"rank 1: end of the stacks")
    return outcome("train.watchdog (2 s)", trial.named(run, r"it waits for rank (\d)"), 3, trial.resumes())


@fault(GROUP, "no memory: ulimit -v of one rank", fast=True)
def memory(trial):
    wide = "model.width=40000000"  # 480 MB for one of its parameters
    run = trial.start(trial.bin("tessera"), "run", "-n", 2, "bash", "-c", 'if [ $RANK = 1 ]; then ulimit -v 1200000; fi; exec "$@"', "bash",
                      trial.bin("fault_trainer"), "c.yaml", wide, "checkpoint=null", "train.save=null")
    code = run.end()
    trial.check(0 < code < 128, f"exit code {code}", run)
    trial.find(run, r"out of memory \(RLIMIT_AS \d+ MiB; peak \d+ MiB\)")
    return outcome(trial.before_training(run), trial.named(run, r"root cause: rank (\d)"), code, trial.left())


@fault(GROUP, "{option} cannot be written: {what}", fast=True, cases=[dict(option=option, what=what, word=word, text=text) for option, what, word, text in (
    ("train.save", "its folder cannot be made", "train.save=/proc/x/m.safetensors", r"train\.save: .*/proc"),
    ("train.save", "it is a folder", "train.save=tmp", r"train\.save: .*regular file"),
    ("checkpoint.folder", "its folder cannot be made", "checkpoint.folder=/proc/x", r"checkpoint\.folder: .*/proc"),
    ("train.log", "its folder cannot be made", "train.log=/proc/x/log.jsonl", r"train\.log: .*/proc"))])
def cannot_write(trial, option, what, word, text):
    run = trial.train(word, code=2)
    trial.find(run, text)
    return outcome(trial.before_training(run), "none", 2, trial.left())


@fault(GROUP, "a mapped data file is shortened during the run", fast=True)
def shortened(trial):
    (trial.folder / "c.yaml").write_text(GPT2)
    data = trial.folder / "t.bin"
    count = 400_000
    data.write_bytes(struct.pack("<3i", 20240520, 1, count) + bytes(1024 - 12) + bytes(2 * count))
    run = trial.start_training("train.steps=1000000", "checkpoint.every=5", "data.order=sequential")
    run.wait_for_line("checkpoint written to run/step-0*5")
    start = time.monotonic()
    os.truncate(data, 5000)
    code = run.end()
    trial.check(code == 1, f"exit code {code}", run)
    trial.find(run, r"t\.bin was shortened from \d+ to 5000 bytes")
    trial.named(run, r"root cause: rank (\d)")
    left = re.sub(r"step-\d+", "a checkpoint", trial.left())
    return outcome(run.when("was shortened") - start, "the first that reads it", code, left)
