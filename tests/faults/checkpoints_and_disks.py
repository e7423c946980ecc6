"""Damaged checkpoints, hostile files, full disks, locks, and runs that share a folder."""
import json, os, random, re, shlex, subprocess, time

import hostile_safetensors
from containers import in_mounts, why_not
from registry import CannotTry, fault
from trial import STEPS, hook, outcome

GROUP = "Checkpoints and disks"
NEWEST, BEFORE = "step-00000012", "step-00000008"
WIDE = "model.width=2000"  # 14,000 parameters, for files of some size
GO_ON = f"train.steps={STEPS + 4}"


class Verifier:
    """One process that verifies a path for each line."""

    def __init__(self, trial):
        self.trial = trial
        self.process = subprocess.Popen([trial.bin("verify_checkpoints")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=trial.env(),
                                        cwd=trial.folder)
        trial.cleanups += [lambda: self.process.wait(10), self.process.stdout.close, self.process.kill, self.process.stdin.close]

    def __call__(self, path):
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline().rstrip("\n")
        self.trial.check(line, f"verify_checkpoints ended at {path}")
        return line

    def end(self):
        self.process.stdin.close()
        self.trial.check(self.process.wait(10) == 0, "verify_checkpoints failed")


def tensor_at(data, at):
    """The tensor of a safetensors file that has this byte in its data; None: the byte is in the header."""
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__" and begin + entry["data_offsets"][0] <= at < begin + entry["data_offsets"][1]:
            return name
    return None


@fault(GROUP, "one flipped bit: {count} seeded ones in all files of a checkpoint", cases=[dict(count=400)], fast=True)
def flipped_bits(trial, count):
    trial.train(WIDE)
    chosen, verify, folder = random.Random(5), Verifier(trial), trial.folder / "run" / NEWEST
    files = sorted(folder.iterdir())
    slowest, tensors = 0, 0
    for number in range(count):
        path = files[number % len(files)]
        good = path.read_bytes()
        at = chosen.randrange(len(good))
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << chosen.randrange(8)]) + good[at + 1:])
        start = time.monotonic()
        answer = verify(folder)
        slowest = max(slowest, time.monotonic() - start)
        trial.check(answer.startswith("refused: ") and path.name in answer, f"{path.name}, byte {at}: {answer}")
        tensor = tensor_at(good, at) if path.suffix == ".safetensors" else None
        if tensor:
            tensors += 1
            trial.check(f'tensor "{tensor}"' in answer, f"{path.name}, byte {at} in {tensor}: {answer}")
        path.write_bytes(good)
    trial.check(tensors > count // 4 and verify(folder) == "sound", "the bits are as before")
    verify.end()
    return outcome(slowest, "none", 0, f"all {count} refused, with file and tensor")


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def cut_to_nothing(path):
    path.write_bytes(b"")


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def to_folder(path):
    path.unlink()
    path.mkdir()


@fault(GROUP, "each file of a checkpoint: {what}", fast=True,
       cases=[dict(what=what, change=change) for what, change in (("cut by a byte", cut), ("empty", cut_to_nothing), ("longer by a byte", lengthen),
                                                                  ("missing", os.unlink), ("a folder in its place", to_folder))])
def changed_files(trial, what, change):
    trial.train()
    verify, folder = Verifier(trial), trial.folder / "run" / NEWEST
    slowest = 0
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        change(path)
        start = time.monotonic()
        answer = verify(folder)
        slowest = max(slowest, time.monotonic() - start)
        trial.check(answer.startswith("refused: ") and path.name in answer, f"{path.name}: {answer}")
        path.rmdir() if path.is_dir() else None
        path.write_bytes(good)
    trial.check(verify(folder) == "sound", "the files are as before")
    verify.end()
    return outcome(slowest, "none", 0, "all refused, with the file")


def flip(path, at=-3):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@fault(GROUP, "a damaged newest checkpoint, {policy}",
       cases=[dict(policy="checkpoint.fallback true"), dict(policy="checkpoint.fallback false"), dict(policy="under --max-restarts")])
def damaged(trial, policy):
    trial.train()
    flip(min((trial.folder / "run" / NEWEST).glob("model-*.safetensors")))
    fallback = policy != "checkpoint.fallback false"
    words = [GO_ON] + ([f"checkpoint.fallback={'true' if fallback else 'false'}"] if "restarts" not in policy else [])
    run = trial.train(*words, code=0 if fallback else 2, flags=["--max-restarts", 1] if "restarts" in policy else [])
    trial.find(run, rf"{NEWEST}.*model-00001-of-0000.\.safetensors")
    if not fallback:
        return outcome(trial.before_training(run), "none", 2, trial.left())
    trial.check(trial.weights() == trial.reference(GO_ON), "the run has other bits", run)
    return outcome("before step 0", "none", 0, f"{trial.left()}; the same bits as undisturbed")


@fault(GROUP, "a newest checkpoint of a newer version")
def newer(trial):
    trial.train()
    manifest = trial.folder / "run" / NEWEST / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(re.sub(r'"version": *1', '"version": 9', text))
    trial.check(manifest.read_text() != text, "the version was changed")
    run = trial.train(GO_ON, "checkpoint.fallback=true", code=2)
    trial.check("damaged" not in run.text() and "version" in run.text(), "the message speaks of the version", run)
    return outcome(trial.before_training(run), "none", 2, trial.left())


@fault(GROUP, "a checkpoint of another optimizer: AdamW, then SGD")
def other_optimizer(trial):
    trial.train()
    other = "optimizer={type: SGD, lr: 0.01, momentum: 0.9}"
    run = trial.train(GO_ON, other, code=2)
    trial.find(run, "optimizer.type.*checkpoint.optimizer.*ignore|checkpoint.optimizer.*ignore")
    when, left = trial.before_training(run), trial.left()
    trial.train(GO_ON, other, "checkpoint.optimizer=ignore")
    return outcome(when, "none", 2, f"{left}; resumes with checkpoint.optimizer: ignore")


@fault(GROUP, "{count} hostile safetensors files", cases=[dict(count=len(list(hostile_safetensors.files())))], fast=True)
def hostile(trial, count):
    verify, path = Verifier(trial), trial.folder / "w.safetensors"
    path.write_bytes(hostile_safetensors.GOOD)
    trial.check(verify(path) == "sound", "the good file is read")
    slowest = 0
    for name, data in hostile_safetensors.files():
        path.write_bytes(data)
        start = time.monotonic()
        answer = verify(path)
        slowest = max(slowest, time.monotonic() - start)
        trial.check(answer.startswith("refused: ") and str(path) in answer, f"{name}: {answer}")
    verify.end()
    return outcome(slowest, "none", 0, "all refused, with the file")


@fault(GROUP, "model.init is {what}", cases=[dict(what="a pickle"), dict(what="a zip"), dict(what="random bytes 0")])
def init(trial, what):
    (trial.folder / "w.safetensors").write_bytes(dict(hostile_safetensors.files())[what])
    run = trial.train("model.init=w.safetensors", code=2)
    trial.find(run, "w.safetensors")
    if what != "random bytes 0":
        trial.find(run, what[2:])
    return outcome(trial.before_training(run), "none", 2, trial.left())


@fault(GROUP, "a symbolic link to somebody's file as .lock", fast=True)
def linked_lock(trial):
    victim = trial.folder / "victim"
    victim.write_text("theirs\n")
    (trial.folder / "run").mkdir()
    (trial.folder / "run/.lock").symlink_to(victim)
    run = trial.train(code=2)
    trial.find(run, r"\.lock")
    trial.check(victim.read_text() == "theirs\n", "the file was changed", run)
    return outcome(trial.before_training(run), "none", 2, f"{trial.left()}; the file is untouched")


def busy(trial, *words):
    """A training that goes on until it is ended."""
    run = trial.start_training("train.steps=1000000", "checkpoint.every=1000000", "train.eval_every=0", *words)
    run.wait_for_line(r"step +\d+/")
    return run


@fault(GROUP, "a second run in the same folder", fast=True)
def second_run(trial):
    first = busy(trial)
    second = trial.train("train.log=null", code=2)
    trial.find(second, r"two runs cannot share a folder")
    trial.find(second, r"pid \d+")
    trial.check(first.process.poll() is None, "the first run goes on", first)
    first.process.kill()
    first.end()
    return outcome(trial.before_training(second), "none", 2, "the first run goes on")


@fault(GROUP, "a second run with the same train.log")
def second_log(trial):
    first = busy(trial, "checkpoint=null")
    second = trial.train("checkpoint=null", code=2)
    trial.find(second, r"train.log: log.jsonl: another run is writing this file")
    trial.check(first.process.poll() is None, "the first run goes on", first)
    first.process.kill()
    first.end()
    for line in (trial.folder / "log.jsonl").read_text().splitlines()[:-1]:
        json.loads(line)
    return outcome(trial.before_training(second), "none", 2, "the first run goes on; its log is whole")


@fault(GROUP, ".lock removed under a run, then a second run in the folder")
def removed_lock(trial):
    first = trial.start_training("train.steps=1000000", "checkpoint.every=100", "train.log=null", hook(do="none", time_out=0))
    first.wait_for_line("checkpoint written")
    (trial.folder / "run/.lock").unlink()
    start = time.monotonic()
    code = first.end()
    trial.check(code == 1, f"exit code {code}", first)
    trial.find(first, r"run/\.lock")
    trial.left_before = trial.left()
    trial.check(trial.left_before.endswith(", sound"), trial.left_before)
    trial.train("train.steps=0", "checkpoint.resume=false", "train.log=null")
    return outcome("at the next checkpoint", "none", code, "the last checkpoint, sound")


@fault(GROUP, "a full disk at the third checkpoint (a tmpfs of 1 MiB)")
def full_disk(trial):
    front = in_mounts("mkdir -p run", "mount -t tmpfs -o size=1m none run")
    reason = why_not(front)
    if reason:
        raise CannotTry(reason)
    words = ["model.width=6000", "checkpoint.keep_last=2"]
    command = [trial.bin("tessera"), "run", "-n", 3, trial.bin("fault_trainer"), "c.yaml", *words]
    after = f"{shlex.join(map(str, command))}; code=$?; rm -rf kept; cp -r run kept; exit $code"
    run = trial.start(*front, "sh", "-c", after)
    code = run.end()
    trial.check(code == 1, f"exit code {code}", run)
    trial.find(run, "No space left on device")
    left = trial.left("kept")
    trial.check([path.name for path in (trial.folder / "kept").iterdir() if "partial" in path.name] == [], "no partial checkpoint is left")
    (trial.folder / "run").rmdir()
    (trial.folder / "kept").rename(trial.folder / "run")
    trial.left_before = left
    return outcome("at the checkpoint", "none", code, trial.resumed(*words))


@fault(GROUP, "a limit on the size of files (ulimit -f) below that of a checkpoint's", fast=True)
def limited(trial):
    run = trial.train(WIDE, front=["bash", "-c", 'ulimit -f 16; exec "$@"', "bash"], code=1)
    trial.find(run, "File too large")
    return outcome("at the checkpoint", trial.named(run, r"rank (\d) \(pid \d+\) exited with code 1 on .* root cause"), 1, trial.resumes(WIDE))


@fault(GROUP, "checkpoint.folder on a read-only file system")
def read_only(trial):
    front = in_mounts("mkdir -p run", "mount --bind run run", "mount -o remount,bind,ro run")
    reason = why_not(front)
    if reason:
        raise CannotTry(reason)
    run = trial.train(front=front, code=2)
    trial.find(run, "Read-only file system")
    return outcome(trial.before_training(run), "none", 2, trial.left())


@fault(GROUP, "train.log on a full disk (a tmpfs of 4 KiB)")
def full_log(trial):
    front = in_mounts("mkdir -p logs", "mount -t tmpfs -o size=4k none logs")
    reason = why_not(front)
    if reason:
        raise CannotTry(reason)
    run = trial.train("train.log=logs/log.jsonl", "checkpoint=null", "train.steps=200", front=front, code=1)
    trial.find(run, "logs/log.jsonl.*No space left on device")
    return outcome("in the step", trial.named(run, r"root cause: rank (\d)"), 1, trial.left())


@fault(GROUP, "SIGKILL of all processes while a checkpoint is written, {count} times", cases=[dict(count=3)], bound=300)
def killed_while_writing(trial, count):
    words = ["model.width=60000", "train.steps=200", "checkpoint.every=1"]
    caught = 0
    for _ in range(4 * count):
        run = trial.start_training(*words)
        end = time.monotonic() + 150
        while not list(trial.folder.glob("run/.step-*.partial-*")) or not list(trial.folder.glob("run/step-*")):
            trial.check(time.monotonic() < end and run.process.poll() is None, "no checkpoint is written", run)
        run.process.kill()
        run.end()
        trial.nothing_runs()
        caught += bool(list(trial.folder.glob("run/.step-*.partial-*")))
        states = trial.verify(*sorted(trial.folder.glob("run/step-*")))
        trial.check(set(states) <= {"sound"}, f"{states}")
        if caught == count:
            break
    trial.check(caught == count, f"only {caught} runs were killed while they wrote")
    step = max(int(path.name[5:]) for path in trial.folder.glob("run/step-*")) + 2
    trial.left_before = "the last checkpoint, sound"
    result = trial.resumed(words[0], f"train.steps={step}", "checkpoint.every=0")
    trial.check(not list(trial.folder.glob("run/.step-*")), "unfinished checkpoints are removed")
    return outcome("none", "none", 137, result)
