"""Trainings on two hosts, which are two network namespaces with a launcher in each, that start again together after a failure."""
import os, pathlib, shutil, signal, sys, tempfile, time, unittest

from each_test import run_each
from processes import Run, environment, kill, marked, ranks
from two_hosts import ADDRESSES, TwoHosts, ip

SKIPPED = 77
PORT = 29841
REJOIN = 4  # --rejoin-timeout
TIME_OUT = 3  # of the ranks
STEPS = 40
# Both hosts share the folder.
CONFIG = f"""
model: {{type: Net, seed: 1}}
data: {{type: Samples, order: sequential}}
loss: {{type: faulty}}
optimizer: {{type: AdamW, lr: 0.01}}
parallel: {{type: ZeroRedundancyOptimizer}}
hooks: [{{type: Fault, do: none, time_out: {1000 * TIME_OUT}}}]
train: {{steps: {STEPS}, global_batch: 12, log: log.jsonl, save: out.safetensors}}
checkpoint: {{folder: run, every: 4}}
"""


def said(run):
    """The output without the lines of steps, which are many."""
    return "\n".join(line for _, line in list(run.lines) if not line.startswith(("step ", "checkpoint written")))


class TwoLaunchers(unittest.TestCase):
    build = hosts = None  # set by main()

    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="tessera-rounds-")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        (self.folder / "tmp").mkdir()
        self.configure(CONFIG)
        self.mark = f"ROUNDS={self.folder.name}"
        self.addCleanup(self.hosts.mend)
        self.addCleanup(self.end_all)

    def clear(self):
        """Removes what a run has written."""
        for name in ("run", "reference"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in ("log.jsonl", "out.safetensors"):
            (self.folder / name).unlink(missing_ok=True)

    def configure(self, text):
        (self.folder / "c.yaml").write_text(text)

    def end_all(self):
        for pid in marked(self.mark):
            kill(pid, signal.SIGCONT)
            kill(pid)

    def launch(self, host, *program, nnodes="1:2", restarts=3, rejoin=REJOIN, ranks_here=1):
        run = Run(*self.hosts.command(host, self.build / "bin/tessera", "run", "--nnodes", nnodes, "--node-rank", host, "-n", ranks_here, "--master-addr",
                                      ADDRESSES[0], "--master-port", PORT, "--max-restarts", restarts, "--restart-delay", 0.2, "--rejoin-timeout", rejoin, *program),
                  env=environment(TESSERA_SECRET="shared by all hosts", TMPDIR=str(self.folder / "tmp"), XDG_RUNTIME_DIR="", ROUNDS=self.folder.name), cwd=self.folder)
        self.addCleanup(run.close)
        return run

    def train(self, host, *words, **how):
        return self.launch(host, self.build / "bin/fault_trainer", "c.yaml", *words, **how)

    def train_both(self, *words, **how):
        return [self.train(host, *words, **how) for host in range(2)]

    def rank_pid(self, rank):
        return ranks(self.mark, "fault_trainer")[rank]

    def goes_on(self, run):
        """Waits for a checkpoint that is written from now on."""
        before = len(run.lines)
        run.wait_for(lambda: any("checkpoint written" in line for _, line in run.lines[before:]), 30, "training goes on")

    def undisturbed(self, *words, ranks_here=2):
        """The folder of the same training on one host."""
        folder = self.folder / "reference"
        folder.mkdir()
        (folder / "c.yaml").write_text((self.folder / "c.yaml").read_text())
        run = Run(self.build / "bin/tessera", "run", "-n", ranks_here, self.build / "bin/fault_trainer", "c.yaml", *words, env=environment(), cwd=folder)
        self.addCleanup(run.close)
        self.assertEqual(run.end(), 0, run.text())
        return folder

    def has_the_bits_of_an_undisturbed_run(self, ranks_here=2):
        self.assertEqual((self.folder / "out.safetensors").read_bytes(), (self.undisturbed(ranks_here=ranks_here) / "out.safetensors").read_bytes())

    def within(self, seconds, run, pattern, start):
        """Waits for the line, which must come at most so many seconds after `start`."""
        run.wait_for_line(pattern, seconds + 20)
        self.assertLess(run.when(pattern) - start, seconds, f"{pattern}\n" + said(run))

    def ended(self, runs, codes, seconds=90):
        """All launchers end with these codes, and leave no process and no file."""
        found = [run.end(seconds) for run in runs]
        self.assertEqual(found, codes, "\n".join(map(said, runs)))
        end = time.monotonic() + 10
        while marked(self.mark) or list((self.folder / "tmp").iterdir()):
            self.assertLess(time.monotonic(), end, f"left behind: {marked(self.mark).keys()} {list((self.folder / 'tmp').iterdir())}")
            time.sleep(0.02)


def main(jobs):
    """All tests, `jobs` at a time, each between two hosts of its own; or those that the command line names."""
    if len(sys.argv) == 2:
        sys.exit(run_each(sys.argv[1:], jobs))
    TwoLaunchers.build = pathlib.Path(sys.argv.pop(1)).resolve()
    try:
        hosts = TwoLaunchers.hosts = TwoHosts()
    except OSError as error:
        print(f"two network namespaces cannot be made: {error}")
        sys.exit(SKIPPED)
    try:
        done = unittest.main(exit=False, verbosity=2)
    finally:
        hosts.remove()
    left = [name for name in hosts.names if name in ip("netns", "list")]
    if left:
        print(f"left behind: {left}")
    sys.exit(bool(left) or not done.result.wasSuccessful())
