"""Worlds that do not come together, and configs that are wrong."""
import re, socket, time

from registry import fault
from trial import TIMEOUT, outcome

GROUP = "Start-up and rendezvous"


def free_port():
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


def alone(trial, **env):
    return trial.start(trial.bin("fault_trainer"), "c.yaml", f"parallel.timeout={TIMEOUT}", env=env)


@fault(GROUP, "one of two ranks never starts: rank {missing}", cases=[dict(missing=1), dict(missing=0)])
def missing(trial, missing):
    start = time.monotonic()
    run = alone(trial, RANK=str(1 - missing), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    code = run.end()
    trial.check(code == 1 and time.monotonic() - start < TIMEOUT + 20, f"exit code {code}", run)
    return outcome(f"time-out ({TIMEOUT} s)", trial.named(run, r"BrokenWorldError: .* (?:rank (\d) did not arrive|waited 1500 ms for rank (\d))"), code, trial.left())


@fault(GROUP, "a rank ends before it joins the world", fast=True)
def early_end(trial):
    run = trial.start(trial.bin("tessera"), "run", "-n", 3, "bash", "-c", 'if [ $RANK = 1 ]; then exit 5; fi; exec "$@"', "bash",
                      trial.bin("fault_trainer"), "c.yaml")
    code = run.end()
    trial.check(code == 5, f"exit code {code}", run)
    return outcome(trial.before_training(run), trial.named(run, r"root cause: rank (\d)"), code, trial.left())


@fault(GROUP, "the environment says {words}", cases=[dict(words=words) for words in (
    "RANK=7 WORLD_SIZE=2", "RANK=-1 WORLD_SIZE=2", "RANK=x WORLD_SIZE=2", "RANK=0 WORLD_SIZE=0", "RANK=0 WORLD_SIZE=two", "RANK=0",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=99999")])
def environment(trial, words):
    run = alone(trial, **dict(word.split("=") for word in words.split()))
    code = run.end()
    trial.check(code in (1, 2), f"exit code {code}", run)
    trial.find(run, "|".join(word.split("=")[0] for word in words.split()))
    return outcome(trial.before_training(run), "none", code, trial.left())


@fault(GROUP, "in the config: {word}", cases=[dict(word=word, names=names) for word, names in (
    ("train.stepz=3", 'did you mean "steps"'), ("parallel.type=ZeroRedundancyOptimiser", "ZeroRedundancyOptimizer"), ("parallel.backend=smh", "shm"),
    ("train.global_batch=13", "train.global_batch: 13"), ("optimizer.lr=-1", "optimizer.lr"), ("train.steps=1e400", "train.steps"),
    ("data.type=Nothing", "data.type"), ("hooks=[{type: Foult}]", "Fault"))])
def config(trial, word, names):
    run = trial.start_training(word)
    code = run.end()
    trial.check(code == 2, f"exit code {code}", run)
    trial.check(names in run.text(), f"no {names}", run)
    return outcome(trial.before_training(run), trial.named(run, r"root cause: rank (\d)"), code, trial.left())


@fault(GROUP, "in the config of one rank: train.stepz=3", fast=True)
def config_of_one(trial):
    run = trial.start(trial.bin("tessera"), "run", "-n", 3, "bash", "-c", 'if [ $RANK = 1 ]; then set -- "$@" train.stepz=3; fi; exec "$@"', "bash",
                      trial.bin("fault_trainer"), "c.yaml")
    code = run.end()
    trial.check(code == 2, f"exit code {code}", run)
    trial.find(run, r'rank 1: .*did you mean "steps"')
    return outcome(trial.before_training(run), trial.named(run, r"root cause: rank (\d)"), code, trial.left())


@fault(GROUP, "the config file is {what}", cases=[dict(what=what, data=data) for what, data in (
    ("missing", None), ("empty", b""), ("binary", bytes(range(256)) * 8), ("cut in the middle", b"model: {type: Net, see"),
    ("full of control characters", b"model: {type: \x1b[31mNet\x07}\n"))])
def config_file(trial, what, data):
    (trial.folder / "c.yaml").unlink()
    if data is not None:
        (trial.folder / "c.yaml").write_bytes(data)
    run = trial.start_training()
    code = run.end()
    trial.check(code == 2, f"exit code {code}", run)
    trial.find(run, r"c\.yaml")
    trial.check(not re.search(r"[\x00-\x08\x0b-\x1f]", run.text()), "control characters are not echoed", run)
    return outcome(trial.before_training(run), "none", code, trial.left())
