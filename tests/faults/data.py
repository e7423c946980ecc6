"""Files of data that are missing, cut or wrong, and samples that cannot be read."""
import os, struct

from ranks_that_differ import npy, numbers
from registry import fault
from trial import outcome

GROUP = "Data"


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def cut_header(path):
    path.write_bytes(path.read_bytes()[:40])


def empty(path):
    path.write_bytes(b"")


def other_text(path):
    path.write_text("inputs are not here\n" * 100)


def huge_shape(path):
    npy(path, (2**62, 3), "<f4", bytes(576))


def objects(path):
    npy(path, (48, 3), "|O", bytes(576))


@fault(GROUP, "a .npy file that {what}", fast=True,
       cases=[dict(what=what, change=change) for what, change in (
           ("lacks its last byte", cut), ("ends in its header", cut_header), ("is empty", empty), ("is missing", os.unlink), ("is a text", other_text),
           ("claims 2**62 rows", huge_shape), ("holds Python objects", objects))])
def npy_file(trial, what, change):
    data = numbers(trial, "a", 48)
    change(trial.folder / "a.npy")
    run = trial.train(f"data={data}", "loss.type=cross_entropy", code=2)
    trial.find(run, r"a\.npy")
    return outcome(trial.before_training(run), "none", 2, trial.left())


GPT2 = """
model: {type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 1, n_head: 2}
data: {type: TokenBin, path: t.bin, seq_len: 16}
optimizer: {type: AdamW, lr: 1e-3}
parallel: {type: ZeroRedundancyOptimizer}
train: {steps: 5, global_batch: 12}
checkpoint: {folder: run}
"""


def tokens(count, magic=20240520, version=1, claimed=None, first=3):
    return struct.pack("<3i", magic, version, count if claimed is None else claimed) + bytes(1024 - 12) + struct.pack(f"<{count}H", first, *[5] * (count - 1))


@fault(GROUP, "a token file {what}", cases=[dict(what=what, data=data) for what, data in (
    ("that lacks its last byte", tokens(400)[:-1]), ("of half its header", tokens(400)[:500]), ("with more tokens claimed", tokens(400, claimed=4000)),
    ("with a negative number of tokens", tokens(400, claimed=-4)), ("with another magic number", tokens(400, magic=7)),
    ("of another version", tokens(400, version=9)), ("with a token that the model lacks", tokens(400, first=700)))])
def token_file(trial, what, data):
    (trial.folder / "c.yaml").write_text(GPT2)
    (trial.folder / "t.bin").write_bytes(data)
    run = trial.train(code=2)
    trial.find(run, r"t\.bin")
    return outcome(trial.before_training(run), "none", 2, trial.left())


@fault(GROUP, "a sample that one rank cannot read", fast=True)
def unreadable(trial):
    run = trial.train(f"data.throw_at={12 * 5 + 7}", code=2)
    trial.find(run, "iteration 5: sample 67 is unreadable")
    return outcome("in the step", trial.named(run, r"root cause: rank (\d)"), 2, trial.left())
