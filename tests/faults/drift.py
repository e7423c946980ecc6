"""One rank's copy of a tensor changes by itself."""
from registry import fault
from trial import AT, hook, outcome, parallel

GROUP = "Drift between replicas"


@fault(GROUP, "one bit of a parameter on one rank: {wrapper}", fast=True, cases=[dict(wrapper="DDP")])
def drifted(trial, wrapper):
    run = trial.train(parallel(wrapper), hook(do="flip", at=AT, rank=1), "train.check_replicas=4", code=1)
    trial.find(run, r"train.check_replicas: after step 7: check_replicas: one.weight on rank 1 is not that of ranks 0, 2")
    return outcome("train.check_replicas steps", trial.named(run, r"one.weight on rank (\d)"), 1, trial.resumes(parallel(wrapper)))


@fault(GROUP, "one bit of a parameter on one rank, train.repair_replicas")
def repaired(trial):
    words = [parallel("DDP"), "train.check_replicas=1"]
    run = trial.train(*words, hook(do="flip", at=AT, rank=1), "train.repair_replicas=true")
    trial.check(trial.weights() != trial.reference(*words), "one step was done with the bit", run)
    return outcome("train.check_replicas steps", trial.named(run, r"one.weight on rank (\d)"), 0, f"{trial.left()}; replicas are equal again")


@fault(GROUP, "one bit of a shard that hybrid sharding replicates, two groups of two ranks")
def hybrid(trial):
    words = ["parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}, sharding_strategy: hybrid_shard, shard_group_size: 2}",
             "train.check_replicas=4"]
    run = trial.train(*words, hook(do="flip", at=AT, rank=1), ranks=4, code=1)
    return outcome("train.check_replicas steps", trial.named(run, r"is not the same on rank (\d+) and rank (\d+)|on rank (\d+) is not that of rank (\d+)"), 1,
                   trial.resumes(*words, ranks=4))
