"""One trial of a fault: a folder of its own, the runs started in it, and what they leave behind."""
import pathlib, re, signal, subprocess, sys, tempfile, threading, time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from processes import Run, environment, kill, marked, ranks
from registry import Outcome, within

TIMEOUT = 1.5  # seconds, of the worlds in which a rank is stopped or late; not at the start, which may take long on a busy machine
STEPS, EVERY, AT = 12, 4, 6  # steps of a run, steps between checkpoints, steps done before the fault

CONFIG = f"""
model: {{type: Net, seed: 1}}
data: {{type: Samples, order: sequential}}
loss: {{type: faulty}}
optimizer: {{type: AdamW, lr: 0.01}}
parallel: {{type: ZeroRedundancyOptimizer}}
train: {{steps: {STEPS}, global_batch: 12, log: log.jsonl, save: out.safetensors}}
checkpoint: {{folder: run, every: {EVERY}}}
"""

WRAPPERS = {"DDP": "DistributedDataParallel", "ZeRO": "ZeroRedundancyOptimizer", "FSDP": "FullyShardedDataParallel"}


def parallel(wrapper, backend="auto"):
    more = ", wrap_policy: {type: leaves}" if wrapper == "FSDP" else ""
    return f"parallel={{type: {WRAPPERS[wrapper]}, backend: {backend}{more}}}"


def hook(**options):
    return "hooks=[{type: Fault, " + ", ".join(f"{key}: {value}" for key, value in options.items()) + "}]"


class References:
    """The weights of undisturbed runs, each computed once."""

    def __init__(self):
        self.lock, self.known = threading.Lock(), {}

    def get(self, key, compute):
        with self.lock:
            entry = self.known.setdefault(key, [threading.Lock(), None])
        with entry[0]:
            if entry[1] is None:
                entry[1] = compute()
            return entry[1]


class Trial:
    def __init__(self, build, references):
        self.build, self.references = build, references
        self.temporary = tempfile.TemporaryDirectory(prefix="tessera-fault-")
        self.folder = pathlib.Path(self.temporary.name)
        self.mark = self.folder.name
        self.runs, self.cleanups, self.doing = [], [], "nothing"
        (self.folder / "tmp").mkdir()
        (self.folder / "c.yaml").write_text(CONFIG)

    # Starting

    def env(self, **more):
        return environment(**{"TMPDIR": str(self.folder / "tmp"), "XDG_RUNTIME_DIR": "", "FAULT_TRIAL": self.mark, **more})

    def bin(self, name):
        return str(self.build / "bin" / name)

    def start(self, *command, env=None, cwd=None, **options):
        run = Run(*command, env=self.env(**(env or {})), cwd=cwd or self.folder, **options)
        self.runs.append(run)
        return run

    def start_training(self, *words, ranks=3, flags=(), front=(), program="fault_trainer", **options):
        return self.start(*front, self.bin("tessera"), "run", "-n", ranks, *flags, self.bin(program), "c.yaml", *words, **options)

    def train(self, *words, code=0, seconds=150, **options):
        """A training that ends by itself, with this exit code."""
        run = self.start_training(*words, **options)
        actual = run.end(seconds)
        self.check(actual == code, f"exit code {actual}, expected {code}", run)
        return run

    # Checking

    def check(self, condition, message, run=None):
        if not condition:
            raise AssertionError(message + ("\n" + run.text() if run else ""))

    def find(self, run, pattern):
        found = re.search(pattern, run.text())
        self.check(found, f"no line matches {pattern!r}", run)
        return found

    def named(self, run, pattern):
        """The ranks that the group(s) of the pattern name, over all lines that match."""
        found = set()
        for groups in re.findall(pattern, run.text()):
            for text in [groups] if isinstance(groups, str) else groups:
                found.update(int(number) for number in re.findall(r"\d+", text))
        self.check(found, f"no line matches {pattern!r}", run)
        return sorted(found)

    def fault_at(self, run):
        """The time of the fault that the hook announced."""
        return float(self.find(run, r"fault at ([\d.]+)")[1])

    def rank_pid(self, rank, seconds=60):
        """The process of a rank; waits until there is one."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = ranks(f"FAULT_TRIAL={self.mark}", "fault_trainer")
            if rank in found:
                return found[rank]
            time.sleep(0.02)
        raise AssertionError(f"rank {rank} has not started")

    def before_training(self, run):
        """The time of errors that must come before the first step."""
        self.check(not re.search(r"(?m)^step +\d", run.text()), "a step was done", run)
        return "before step 0"

    # What is left

    def verify(self, *folders):
        """For each checkpoint folder: sound, unsound: …, or refused: …"""
        done = subprocess.run([self.bin("verify_checkpoints")], input="".join(f"{folder}\n" for folder in folders), capture_output=True, text=True,
                              env=self.env(), cwd=self.folder, timeout=150)
        self.check(done.returncode == 0, done.stdout + done.stderr)
        return done.stdout.splitlines()

    def left(self, folder="run"):
        """The newest checkpoint, its state, and what was set aside."""
        where = self.folder / folder
        names = sorted(path.name for path in where.iterdir()) if where.is_dir() else []
        steps = [name for name in names if name.startswith("step-")]
        texts = []
        if steps:
            states = self.verify(*(where / name for name in steps))
            texts.append(f"{steps[-1]}, {states[-1].partition(':')[0]}")
            if states[-1] != "sound" and "sound" in states:
                texts.append(f"{steps[len(states) - 1 - states[::-1].index('sound')]}, sound")
        texts += [name for name in names if name.startswith("damaged-")]
        return "; ".join(texts) or "nothing"

    def reference(self, *words, ranks=3, name="out.safetensors"):
        """The weights of the same training, undisturbed."""
        def compute():
            other = Trial(self.build, self.references)
            try:
                other.train(*words, ranks=ranks)
                return (other.folder / name).read_bytes()
            finally:
                other.close()
        return self.references.get((words, ranks, name), compute)

    def weights(self):
        return (self.folder / "out.safetensors").read_bytes()

    def resumed(self, *words, ranks=3):
        """Resumes the training and compares its weights with those of an undisturbed one."""
        self.train(*words, ranks=ranks)
        self.check(self.weights() == self.reference(*words, ranks=ranks), "the resumed run has other bits")
        return f"{self.left_before}; resumes to the same bits"

    def resumes(self, *words, ranks=3):
        self.left_before = self.left()
        return self.resumed(*words, ranks=ranks)

    def nothing_runs(self, seconds=20):
        """No process and no file for temporary use is left."""
        end = time.monotonic() + seconds
        while marked(f"FAULT_TRIAL={self.mark}") or list((self.folder / "tmp").iterdir()):
            if time.monotonic() > end:
                raise AssertionError(f"left behind: {marked(f'FAULT_TRIAL={self.mark}').keys()} {list((self.folder / 'tmp').iterdir())}")
            time.sleep(0.02)

    def close(self):
        for pid in marked(f"FAULT_TRIAL={self.mark}"):
            kill(pid, signal.SIGCONT)
            kill(pid)
        for run in self.runs:
            run.close()
        for cleanup in reversed(self.cleanups):
            cleanup()
        self.temporary.cleanup()


def ranks_text(ranks):
    return ", ".join(str(rank) for rank in ranks) or "none"


def outcome(when, ranks, code, left):
    return Outcome(when if isinstance(when, str) else within(when), ranks if isinstance(ranks, str) else ranks_text(ranks), str(code), left)
