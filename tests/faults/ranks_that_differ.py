"""One rank has another config, other data, another model or makes another call than the others."""
import struct

from registry import fault
from trial import outcome, parallel

GROUP = "Ranks that differ"
DIFFER = r"the ranks differ: [^\n]* on ranks 0, 2; [^\n]* on rank (\d)"


def with_other_words(trial, common, usual, other):
    """Rank 1 of 3 gets the word `other` in its command line, the others `usual`."""
    choose = f'if [ $RANK = 1 ]; then word="{other}"; else word="{usual}"; fi; exec "$@" "$word"'
    run = trial.start(trial.bin("tessera"), "run", "-n", 3, "bash", "-c", choose, "bash", trial.bin("fault_trainer"), "c.yaml", *common)
    return run, run.end()


@fault(GROUP, "another {key} on one rank", fast=True,
       cases=[dict(key=key, usual=usual, other=other) for key, usual, other in (
           ("optimizer.lr", "0.01", "0.02"), ("optimizer.betas", "[0.9, 0.95]", "[0.9, 0.99]"), ("optimizer.type", "AdamW", "Adam"),
           ("optimizer.weight_decay", "0.1", "0.2"), ("train.clip_grad_norm", "1", "2"), ("scheduler", "{type: cosine, t_max: 9}", "{type: cosine, t_max: 8}"),
           ("data.seed", "0", "1"), ("model.width", "16", "32"), ("model.seed", "1", "2"), ("train.global_batch", "12", "24"), ("train.steps", "12", "13"),
           ("train.accumulation", "1", "2"), ("train.check_replicas", "100", "50"), ("parallel.type", "DistributedDataParallel", "ZeroRedundancyOptimizer"),
           ("parallel.timeout", "60", "30"), ("checkpoint.every", "4", "5"), ("checkpoint.folder", "run", "run2"))])
def other_config(trial, key, usual, other):
    run, code = with_other_words(trial, [],
                                 f"{key}={usual}", f"{key}={other}")
    trial.check(code == 2, f"exit code {code}", run)
    trial.find(run, rf"{key}[^\n]*: the ranks differ")
    return outcome(trial.before_training(run), trial.named(run, DIFFER), code, trial.left())


def npy(path, shape, kind, data):
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    head += b" " * (63 - (10 + len(head)) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + data)


def numbers(trial, name, rows, last=0.0):
    """Files of inputs [rows, 3] and targets [rows]."""
    values = [0.1 * i for i in range(3 * rows - 1)] + [last]
    npy(trial.folder / f"{name}.npy", (rows, 3), "<f4", struct.pack(f"<{3 * rows}f", *values))
    npy(trial.folder / f"{name}-targets.npy", (rows,), "<i8", struct.pack(f"<{rows}q", *[i % 2 for i in range(rows)]))
    return f"{{type: Npy, order: sequential, inputs: {name}.npy, targets: {name}-targets.npy}}"


@fault(GROUP, "data of {what} on one rank, in a file of the same name", cases=[dict(what="another size"), dict(what="another content")])
def other_data(trial, what):
    numbers(trial, "a", 48)
    (trial.folder / "other").mkdir()
    (trial.folder / "other/c.yaml").write_text((trial.folder / "c.yaml").read_text())
    keep, trial.folder = trial.folder, trial.folder / "other"
    numbers(trial, "a", 60 if what == "another size" else 48, last=7.0)
    trial.folder = keep
    choose = 'if [ $RANK = 1 ]; then cd other; fi; exec "$@"'
    run = trial.start(trial.bin("tessera"), "run", "-n", 3, "bash", "-c", choose, "bash", trial.bin("fault_trainer"), "c.yaml", "loss.type=cross_entropy", "checkpoint=null",
                      "data={type: Npy, order: sequential, inputs: a.npy, targets: a-targets.npy}")
    code = run.end()
    trial.check(code == 2, f"exit code {code}", run)
    trial.find(run, "data.train, " + ("number of samples" if what == "another size" else "samples 0"))
    return outcome(trial.before_training(run), trial.named(run, DIFFER), code, trial.left())


@fault(GROUP, "a dataset that gives fewer rows on one rank", fast=True)
def fewer_rows(trial):
    run = trial.train("data.fewer_on=1", code=2)
    return outcome(trial.before_training(run), trial.named(run, r"rank (\d): data: [^\n]* has 15 rows for 16 samples"), 2, trial.left())


@fault(GROUP, "a model with other shapes on one rank: {wrapper}", cases=[dict(wrapper=wrapper) for wrapper in ("DDP", "ZeRO", "FSDP")])
def other_model(trial, wrapper):
    run = trial.train(parallel(wrapper), "model.wider_on=1", code=2)
    trial.find(run, "one.weight")
    return outcome(trial.before_training(run), trial.named(run, r"on rank 0[^\n]* on rank (1)"), 2, trial.left())


@fault(GROUP, "{what} on one rank, in a program of one's own", fast=True,
       cases=[dict(what=what, kind=kind, code=code) for what, kind, code in (
           ("another learning rate in a step", "schedule", 4), ("another class of the optimizer", "class", 4), ("other options of the optimizer", "options", 4),
           ("two collectives in another order", "order", 4), ("a collective of another size", "sizes", 4), ("a collective of another dtype", "dtypes", 4),
           ("the sum instead of the mean", "scale", 4), ("two equal collectives with other tags", "tags", 4), ("a collective that is left out", "leaves", 3))])
def other_call(trial, what, kind, code):
    run = trial.start(trial.bin("tessera"), "run", "-n", 3, trial.bin("fault_ranks"), kind)
    actual = run.end()
    trial.check(actual == code, f"exit code {actual}", run)
    ranks = trial.named(run, r"usage: [^\n]*rank (2)\b" if code == 4 else r"rank (\d) has left")
    return outcome("in the call", ranks, code, "nothing")
