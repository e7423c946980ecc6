"""File operations that fail, transfer fewer bytes, or end their process: those of single writers and readers, which the program
file_operations tries, and those of whole trainings, which load the library failing_files first."""
import collections, json, os, random, re, shutil, sys, tempfile, time

from registry import fault
from trial import EVERY, STEPS, Trial, outcome

GROUP = "Checkpoints and disks"
RESULT = r"(\d+) of (\d+) operations tried in \d+ scenarios, (\d+) findings"
HOWS = ["kill", "EIO", "EIO+", "ENOSPC", "ENOSPC+", "ESTALE", "EMFILE", "EINTR", "short"]
RANKS = 2
GO_ON = (f"train.steps={STEPS + EVERY}", "checkpoint.fallback=true", "train.save_optimizer=optimizer.pt",
         "hooks=[{type: CSV, path: log.csv}, {type: TensorBoard, folder: tensorboard}]")


@fault(GROUP, "each file operation, seeded, fails, is short or kills: {what}", cases=[dict(what=what, word=word, most=most) for what, word, most in (
    ("a checkpoint is written", "a checkpoint is written", 2), ("a checkpoint is replaced", "a checkpoint is replaced", 2),
    ("a checkpoint is read", "a checkpoint is read", 4), ("a folder of weights is replaced or read", "a folder of weights", 3),
    ("a file of weights, optimizer state or text is replaced", "file", 3))])
def operations(trial, what, word, most):
    run = trial.start(trial.bin("file_operations"), "--most", most, word)
    code = run.end(280)
    found = trial.find(run, RESULT)
    trial.check(code == 0 and found[3] == "0" and int(found[1]) > 50, f"exit code {code}", run)
    return outcome("in the operation", "none", 0, "what was complete before, or the new one; the next save works")


class Training:
    """A training that resumes while an operation of one of its processes fails."""

    def __init__(self, trial):
        self.trial = trial
        trial.train(ranks=RANKS)
        self.good = trial.folder / "good"
        shutil.copytree(trial.folder / "run", self.good)
        self.log = (trial.folder / "log.jsonl").read_bytes()

    def attempt(self, rank, how, at, lacks=""):
        """Exit code, and the number of operations."""
        trial = self.trial
        for name in ("run", "tensorboard"):
            shutil.rmtree(trial.folder / name, ignore_errors=True)
        for name in ("out.safetensors", "optimizer.pt", "log.csv", "operations.txt"):
            (trial.folder / name).unlink(missing_ok=True)
        shutil.copytree(self.good, trial.folder / "run")
        (trial.folder / "log.jsonl").write_bytes(self.log)
        log = trial.folder.parent / f"{trial.folder.name}-operations.txt"
        log.write_text("")
        # Rendezvous files need flock(), so they are elsewhere where the run's folder has none.
        elsewhere = tempfile.TemporaryDirectory() if lacks == "flock" else None
        env = dict(LD_PRELOAD=str(trial.build / "lib/libfailing_files.so"), FAILING_FILES_UNDER=str(trial.folder), FAILING_FILES_AT=str(at),
                   FAILING_FILES_HOW=how, FAILING_FILES_RANK=str(rank), FAILING_FILES_LACKS=lacks, FAILING_FILES_LOG=str(log))
        if elsewhere:
            env["TMPDIR"] = elsewhere.name
        run = trial.start_training(*GO_ON, ranks=RANKS, env=env)
        code = run.end(100)
        lines = log.read_text().splitlines()
        log.unlink()
        return code, lines, run

    def check(self, code, lines, run, how, rank):
        """What was complete before is there; the undisturbed command ends with the weights of an undisturbed training."""
        trial = self.trial
        if code < 0 or code > 128 and how != "kill":
            trial.check(False, f"exit code {code} after {lines[-1:]}", run)
        if how in ("EINTR", "short"):
            trial.check(code == 0, f"exit code {code} after {lines[-1:]}", run)
        left = sorted(path.name for path in (trial.folder / "run").iterdir())
        steps = [name for name in left if name.startswith("step-")]
        trial.check(steps and steps[-1] >= f"step-{STEPS:08}" and set(trial.verify(*(trial.folder / "run" / name for name in steps))) == {"sound"},
                    f"left are {left} after {lines[-1:]}", run)
        trial.check(not any(name.startswith("damaged") for name in left), f"a sound checkpoint was set aside: {left} after {lines[-1:]}", run)
        if rank >= 0:
            trial.nothing_runs()
        trial.train(*GO_ON, ranks=RANKS)
        trial.nothing_runs()  # also what a launcher that failed has left
        trial.check(trial.weights() == trial.reference(*GO_ON, ranks=RANKS), f"other bits after {lines[-1:]}", run)
        steps = [json.loads(line)["step"] for line in (trial.folder / "log.jsonl").read_text().splitlines()]
        trial.check(steps == list(range(STEPS + EVERY)), f"the log has steps {steps} after {lines[-1:]}", run)
        left = [path for path in trial.folder.rglob(".*") if path.name != ".lock"]
        trial.check(not left, f"left behind: {left} after {lines[-1:]}", run)


@fault(GROUP, "{count} seeded file operations of a training that resumes fail, are short or kill", cases=[dict(count=6)], bound=600)
def trainings(trial, count):
    training, chosen = Training(trial), random.Random(3)
    totals = {}
    for number in range(count):
        rank, how = chosen.choice([-1, 0, 0, 0, 1]), HOWS[number % len(HOWS)]
        if (rank, how) not in totals:
            code, lines, run = training.attempt(rank, how, 0)
            trial.check(code == 0, f"exit code {code} undisturbed", run)
            totals[rank, how] = len(lines)
        if totals[rank, how]:
            training.check(*training.attempt(rank, how, chosen.randint(1, totals[rank, how])), how, rank)
    return outcome("in the operation", "none", "0 to 2, or 137", "what was complete before, sound; resumes to the same bits")


def campaign(build, minutes, seed):
    """All operations of single writers and readers, then random ones of trainings until the time is over. Returns the findings."""
    from trial import References
    trial, chosen, tried, findings = Trial(build, References()), random.Random(seed), collections.Counter(), 0
    try:
        end = time.monotonic() + 60 * minutes
        cores = len(os.sched_getaffinity(0))
        runs = [trial.start(trial.bin("file_operations"), "--part", part, cores) for part in range(cores)]
        shown, running = [0] * cores, True
        while running:
            running = any(run.process.poll() is None for run in runs)
            time.sleep(1)
            for part, run in enumerate(runs):
                lines = [text for _, text in list(run.lines)]
                print("".join(text + "\n" for text in lines[shown[part]:]), end="", flush=True)
                shown[part] = len(lines)
        for run in runs:
            run.end()
            findings += int(trial.find(run, RESULT)[3])
        training, totals = Training(trial), {}
        while time.monotonic() < end:
            rank, how, lacks = chosen.choice([-1, 0, 0, 1, 1]), chosen.choice(HOWS), chosen.choice(["", "", "exchange", "flock"])
            try:
                if (rank, how, lacks) not in totals:
                    totals[rank, how, lacks] = len(training.attempt(rank, how, 0, lacks)[1])
                if totals[rank, how, lacks] == 0:
                    continue
                at = chosen.randint(1, totals[rank, how, lacks])
                tried[rank, how] += 1
                training.check(*training.attempt(rank, how, at, lacks), how, rank)
            except AssertionError as error:
                findings += 1
                print(f"finding: training, rank {rank}, {how} at operation {at}, lacks {lacks or 'nothing'}: {error}", flush=True)
    finally:
        trial.close()
    print(f"trainings: {sum(tried.values())} operations tried: {dict(tried)}; of {totals}; {findings} findings in all")
    return findings


if __name__ == "__main__":
    import argparse, pathlib
    parser = argparse.ArgumentParser(description=campaign.__doc__)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.exit(1 if campaign(options.build.resolve(), options.minutes, options.seed) else 0)
