#!/usr/bin/env python3
"""Disturbs trainings at random and compares them with undisturbed ones, bit by bit.

    soak.py BUILD [--minutes 30] [--seed 1] [--cycles N] [--faults 12]

A cycle is one training under `tessera run --max-restarts`: wrapper, transport, number of ranks and model are drawn by the seed. Faults come
at random times. Some cycles have samples with NaN that train.on_nonfinite leaves out; the undisturbed run leaves out the same. At the end
the weights must have the bits, and train.log the lines, of the undisturbed training. The soak runs in mount, network and pid namespaces of
its own, and all processes in them end with it. Without them (they need root) it does not fill a disk or cut a network, and says so.
"""
import argparse, json, os, pathlib, random, signal, subprocess, sys, tempfile, time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from containers import why_not
from processes import Run, environment, kill, marked, ranks

INSIDE = "FAULT_SOAK_INSIDE"
UNSHARE = ["unshare", "--mount", "--propagation", "private", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
TIMEOUT_MS = 3000  # of a running world; its start may take longer
EVERY = 15  # steps between checkpoints

TEXT_MODEL = """
model: {type: GPT2, vocab_size: 256, n_positions: 32, n_embd: 32, n_layer: 2, n_head: 2, dropout: 0.1, seed: 1}
data: {type: ByteText, path: text.txt, seq_len: 32}
"""
NUMBERS_MODEL = """
model: {type: Net, width: 64, seed: 1}
data: {type: Samples, nan_at: 100, gradient_at: 700}
loss: {type: faulty}
"""
REST = """
optimizer: {type: AdamW, lr: 1e-3}
scheduler: {type: warmup_cosine, warmup_steps: 5}
"""


def write_text(path, chosen):
    words = ["".join(chosen.choices("etaoinshrdlu", k=chosen.randint(2, 8))) for _ in range(300)]
    path.write_text(" ".join(chosen.choices(words, k=6000)) + "\n")


def without_times(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("ms", "tokens_per_s", "samples_per_s")} for line in lines]


class Failure(Exception):
    pass


class Cycle:
    """One training that is disturbed."""

    def __init__(self, build, folder, chosen, steps, confined):
        self.build, self.folder, self.chosen, self.confined = build, folder, chosen, confined
        self.ranks = chosen.choice([2, 3])
        wrapper = chosen.choice(["DistributedDataParallel", "ZeroRedundancyOptimizer", "FullyShardedDataParallel"])
        self.backend = chosen.choice(["shm", "tcp"])
        policy = self.policy = chosen.choice(["stop", "stop", "skip", "rollback"])
        self.steps = steps if policy == "stop" else 2 * steps
        self.name = f"{wrapper} over {self.backend}, {self.ranks} ranks, " + ("text" if policy == "stop" else f"samples with NaN, {policy}")
        folder.mkdir()
        (folder / "tmp").mkdir()
        self.disk = folder / "disk"
        self.disk.mkdir()
        if confined:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", self.disk], check=True)
        write_text(folder / "text.txt", random.Random(7))
        policy_of_wrapper = ", wrap_policy: {type: leaves}" if wrapper.startswith("Fully") else ""
        (folder / "c.yaml").write_text(
            (TEXT_MODEL if policy == "stop" else NUMBERS_MODEL) + REST
            + f"parallel: {{type: {wrapper}, backend: {self.backend}{policy_of_wrapper}}}\n"
            + f"train: {{steps: {self.steps}, global_batch: 12, log: log.jsonl, save: out.safetensors, on_nonfinite: {policy}, log_every: 5}}\n"
            + f"checkpoint: {{folder: disk/run, every: {EVERY}, keep_last: 3}}\n"
            + f"hooks: [{{type: Fault, do: none, time_out: {TIMEOUT_MS}, request: request-}}]\n")
        self.mark = f"FAULT_TRIAL={folder}"
        self.run, self.starts, self.restarts, self.injected = None, 0, 0, []

    # The training

    def start(self, *words):
        self.run = Run(self.build / "bin/tessera", "run", "-n", self.ranks, "--max-restarts", 1000, "--restart-delay", 0, "--restarts-per-hour", 100000, "--stopped-timeout", 2 * TIMEOUT_MS / 1000,
                       self.build / "bin/fault_trainer", "c.yaml", *words, cwd=self.folder, start_new_session=True,
                       env=environment(TMPDIR=str(self.folder / "tmp"), FAULT_TRIAL=str(self.folder), XDG_RUNTIME_DIR=""))
        self.starts += 1

    def end_run(self, seconds):
        code = self.run.end(seconds)
        self.restarts += sum("tessera run: restart " in line for _, line in self.run.lines)
        return code

    def undisturbed(self):
        start = time.monotonic()
        checkpoint = "checkpoint.folder=whole" if self.policy == "rollback" else "checkpoint=null"
        self.start("train.log=whole.jsonl", "train.save=whole.safetensors", checkpoint)
        if self.end_run(300) != 0:
            raise Failure("the undisturbed run failed\n" + self.run.text())
        return time.monotonic() - start

    def trains(self, since, seconds=150):
        """Waits until a step was done after this time; False: the run has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if any(at > since and line.startswith("step ") for at, line in reversed(self.run.lines[-20:])):
                return True
            if self.run.process.poll() is not None:
                return False
            time.sleep(0.01)
        raise Failure(f"no step within {seconds} s after {self.injected[-1:]}\n" + self.run.text()[-4000:])

    def wait_for(self, condition, seconds, event):
        """Waits for it or for the end of the run."""
        end = time.monotonic() + seconds
        while not condition() and self.run.process.poll() is None:
            if time.monotonic() > end:
                raise Failure(f"not within {seconds} s: {event}\n" + self.run.text()[-4000:])
            time.sleep(0.01)

    def said(self, text, since):
        return lambda: any(at > since and text in line for at, line in reversed(self.run.lines[-60:]))

    def rank_pid(self):
        return ranks(self.mark, "fault_trainer").get(self.chosen.randrange(self.ranks))

    # The faults

    def kinds(self):
        kinds = ["kill", "stop", "pause", "launcher", "signal", "flip"]
        if self.policy != "rollback":  # it leaves out the step with the NaN, so data are skipped
            kinds.append("nan")
        if self.confined:
            kinds += ["full disk"] + (["cut", "short cut"] if self.backend == "tcp" else [])
        return kinds

    def inject(self, kind):
        self.injected.append(kind)
        since = time.monotonic()
        if kind in ("kill", "stop", "pause"):
            pid = self.rank_pid()
            if pid is not None:
                kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                if kind == "pause":
                    time.sleep(self.chosen.uniform(0.05, 0.5))
                    kill(pid, signal.SIGCONT)
                if kind == "stop":
                    # By the other ranks, or by the launcher if they do not wait for it.
                    self.wait_for(lambda: self.said("BrokenWorldError", since)() or self.said("root cause", since)(), 150, "the stopped rank is noticed")
        elif kind == "launcher":
            self.run.process.kill()
            self.end_run(10)
        elif kind == "signal":
            self.run.process.send_signal(self.chosen.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]))
            self.wait_for(lambda: False, 150, "the end of the run after a signal")
            self.end_run(1)
        elif kind == "nan":
            (self.folder / f"request-{self.chosen.randrange(self.ranks)}").touch()
            self.wait_for(lambda: not list(self.folder.glob("request-*")), 150, "the NaN is written")
        elif kind == "flip":
            self.run.process.kill()
            self.end_run(10)
            self.flip()
        elif kind == "full disk":
            filler = self.disk / "filler"
            try:
                with filler.open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(65536))
            except OSError:
                pass
            self.wait_for(self.said("No space left on device", since), 150, "the full disk is noticed")
            filler.unlink()
        else:
            subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
            time.sleep(0.3 if kind == "short cut" else TIMEOUT_MS / 1000 + 0.5)
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    def flip(self):
        """Flips a bit of the newest checkpoint, if there is another one."""
        self.wait_until_nothing_runs()
        steps = sorted(self.disk.glob("run/step-*"))
        if len(steps) < 2:
            return
        path = self.chosen.choice(sorted(steps[-1].iterdir()))
        data = bytearray(path.read_bytes())
        data[self.chosen.randrange(len(data))] ^= 1 << self.chosen.randrange(8)
        path.write_bytes(data)

    def wait_until_nothing_runs(self):
        end = time.monotonic() + 10
        while marked(self.mark):
            if time.monotonic() > end:
                raise Failure(f"processes are left: {list(marked(self.mark))}")
            time.sleep(0.02)

    def disturb(self, faults, until):
        """The whole training, with at most so many faults, none after `until`."""
        deck, since = [], time.monotonic()
        self.start()
        while True:
            if not self.trains(since):
                code = self.end_run(1)
                if code == 0:
                    return
                expected = self.injected and self.injected[-1] in ("launcher", "signal", "flip")
                if not expected:
                    raise Failure(f"the launcher gave up with code {code} after {self.injected[-1:]}\n" + self.run.text()[-4000:])
                self.wait_until_nothing_runs()
                since = time.monotonic()
                self.start()
                continue
            for damaged in self.disk.glob("run/damaged-*"):
                subprocess.run(["rm", "-rf", damaged], check=True)
            if faults == 0 or time.monotonic() > until:
                if self.end_run(240) != 0:
                    raise Failure("the run does not end by itself\n" + self.run.text()[-4000:])
                return
            time.sleep(self.chosen.uniform(0, 0.6))
            if self.run.process.poll() is not None:
                since = time.monotonic()  # its last steps are no sign of life
                continue
            deck = deck or self.chosen.sample(self.kinds(), len(self.kinds()))
            faults -= 1
            self.inject(deck.pop())
            since = time.monotonic()

    def compare(self):
        self.wait_until_nothing_runs()
        if list((self.folder / "tmp").iterdir()):
            raise Failure(f"temporary files are left: {list((self.folder / 'tmp').iterdir())}")
        if (self.folder / "out.safetensors").read_bytes() != (self.folder / "whole.safetensors").read_bytes():
            raise Failure("the weights differ from those of the undisturbed run")
        if without_times(self.folder / "log.jsonl") != without_times(self.folder / "whole.jsonl"):
            raise Failure("the log differs from that of the undisturbed run")

    def close(self):
        for pid in marked(self.mark):
            kill(pid, signal.SIGCONT)
            kill(pid)
        if self.run:
            self.run.close()
        if self.confined:
            subprocess.run(["umount", "-l", self.disk], check=False)


def soak(options, confined):
    end = time.monotonic() + 60 * options.minutes
    injected, restarts, starts, cycles, longest = {}, 0, 0, 0, 0
    failure = None
    with tempfile.TemporaryDirectory(prefix="tessera-soak-") as temporary:
        while failure is None and cycles < options.cycles and (cycles == 0 or time.monotonic() + longest < end):
            begin = time.monotonic()
            chosen = random.Random(f"{options.seed} {cycles}")
            cycle = Cycle(options.build.resolve(), pathlib.Path(temporary) / str(cycles), chosen, options.steps, confined)
            try:
                alone = cycle.undisturbed()
                cycle.disturb(options.faults, end - 2 * alone)
                cycle.compare()
                verdict = "the same bits as undisturbed"
            except (Failure, subprocess.SubprocessError, OSError) as reason:
                failure = verdict = f"FAILED: {reason}"
            finally:
                cycle.close()
            for kind in cycle.injected:
                injected[kind] = injected.get(kind, 0) + 1
            cycles, starts, restarts = cycles + 1, starts + cycle.starts, restarts + cycle.restarts
            longest = max(longest, time.monotonic() - begin)
            print(f"cycle {cycles} ({time.monotonic() - begin:.0f} s): {cycle.name}: {', '.join(cycle.injected)}: {verdict}", flush=True)
    print(f"{sum(injected.values())} faults in {cycles} trainings ({', '.join(f'{kind} {count}' for kind, count in sorted(injected.items()))}); "
          f"{restarts} restarts by the launcher, {starts - 2 * cycles} new starts; seed {options.seed}"
          + ("" if confined else "; no disk was filled and no network cut, because namespaces cannot be made here"))
    return 1 if failure else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=30, help="time after which no training begins and no fault comes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cycles", type=int, default=1000000, help="most trainings")
    parser.add_argument("--faults", type=int, default=12, help="most faults in a training")
    parser.add_argument("--steps", type=int, default=300, help="steps of a training")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        reason = why_not(UNSHARE, "ip", "link", "set", "lo", "up") if os.geteuid() == 0 else "not root"
        if reason is None:
            os.environ[INSIDE] = "1"
            os.execvp(UNSHARE[0], [*UNSHARE, sys.executable, *sys.argv])
        print(f"soak.py: no namespaces: {reason}", file=sys.stderr)
        return soak(options, False)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return soak(options, True)


if __name__ == "__main__":
    sys.exit(main())
