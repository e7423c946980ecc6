"""Losses, gradients and parameters that are not finite, and losses that jump."""
from registry import fault
from trial import AT, WRAPPERS, hook, outcome, parallel

GROUP = "Values that are not finite"
SAMPLE = 12 * 5 + 7  # read by rank 1 of 3 in step 5


@fault(GROUP, "{what}: {wrapper}", cases=[dict(what=what, word=word, kind=kind, wrapper=wrapper) for wrapper in WRAPPERS for what, word, kind in (
    ("NaN in the batch of one rank", f"data.nan_at={SAMPLE}", "forward"), ("NaN in the gradient of one rank", f"data.gradient_at={SAMPLE}", "backward"),
    ("NaN in a parameter that one rank owns", hook(do="nan", at=AT, rank=1), "update"))])
def found(trial, what, word, kind, wrapper):
    run = trial.train(parallel(wrapper), word, code=1)
    step = 6 if kind == "update" else 5
    trial.find(run, rf"train.on_nonfinite: stop: step {step}: ")
    ranks = trial.named(run, rf"train.on_nonfinite: stop: step {step}: ranks? ([\d, ]+), {kind}")
    trial.check(not (trial.folder / "out.safetensors").exists(), "no weights are saved", run)
    return outcome("in the step", ranks, 1, trial.left())


@fault(GROUP, "NaN in the batch of one rank, {policy}: {wrapper}", fast=True,
       cases=[dict(policy=policy, wrapper=wrapper) for wrapper in WRAPPERS for policy in ("skip", "rollback")])
def left_out(trial, policy, wrapper):
    words = [parallel(wrapper), f"data.nan_at={SAMPLE}"]
    run = trial.train(*words, f"train.on_nonfinite={policy}")
    trial.check(trial.weights() == trial.reference(*words, "train.on_nonfinite=skip"), "skip and rollback give other bits", run)
    return outcome("in the step", trial.named(run, r"step 5: ranks? ([\d, ]+), forward"), 0,
                   f"{trial.left()}; the bits of a run without this step")


@fault(GROUP, "more steps in a row with NaN than train.nonfinite_limit")
def limit(trial):
    run = trial.train("train.on_nonfinite=skip", "train.nonfinite_limit=1", f"data.nan_at={SAMPLE}", f"data.gradient_at={SAMPLE + 12}", code=1)
    return outcome("in the step", trial.named(run, r"step 6: ranks? ([\d, ]+), "), 1, trial.left())


@fault(GROUP, "NaN in a parameter of one rank, train.on_nonfinite skip: {wrapper}", cases=[dict(wrapper=wrapper) for wrapper in WRAPPERS])
def parameter_under_skip(trial, wrapper):
    run = trial.train(parallel(wrapper), "train.on_nonfinite=skip", hook(do="nan", at=AT, rank=1), code=1)
    return outcome("in the step", trial.named(run, r"on_nonfinite: skip: ranks? ([\d, ]+), update"), 1, trial.resumes(parallel(wrapper)))


@fault(GROUP, "a loss 1000 times too large, train.rollback_on_spike 5")
def spike(trial):
    words = ["train.steps=30", f"data.spike_at={12 * 25 + 7}"]
    run = trial.train(*words, "train.rollback_on_spike=5")
    trial.find(run, "more than 5 times the median")
    straight = trial.reference("train.steps=30", f"data.nan_at={12 * 25 + 7}", "train.on_nonfinite=skip")
    trial.check(trial.weights() == straight, "a run without this step has other bits", run)
    return outcome("in the step", "none", 0, f"{trial.left()}; the bits of a run without this step")


@fault(GROUP, "NaN in a parameter just before a checkpoint", fast=True)
def unsound(trial):
    run = trial.train(hook(do="nan", at=8, rank=1), "checkpoint.keep_last=1", code=1)
    trial.find(run, "run/step-00000008 is marked as unsound: ")
    trial.find(run, "update of step 7: .*one.weight: NaN in 1 of 48 elements; the last sound checkpoint is run/step-00000004")
    return outcome("at the checkpoint", "none", 1, trial.resumes())
