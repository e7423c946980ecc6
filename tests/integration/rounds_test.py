#!/usr/bin/env python3
"""Restarts across two hosts, which are two network namespaces with a launcher in each: lost ranks, launchers and cables. Exits
with 77 if namespaces cannot be made.

    rounds_test.py BUILD_FOLDER
"""
import os, pathlib, signal, sys, tempfile, time, unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from processes import Run, environment, is_running, kill, marked, ranks
from two_hosts import ADDRESSES, TwoHosts

SKIPPED = 77
BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
PORT = 29841
REJOIN = 4
STEPS = 40
HOSTS = None
# Both hosts share the folder.
CONFIG = f"""
model: {{type: Net, seed: 1}}
data: {{type: Samples, order: sequential}}
loss: {{type: faulty}}
optimizer: {{type: AdamW, lr: 0.01}}
parallel: {{type: ZeroRedundancyOptimizer}}
hooks: [{{type: Fault, do: none, time_out: 3000}}]
train: {{steps: {STEPS}, global_batch: 12, log: log.jsonl, save: out.safetensors}}
checkpoint: {{folder: run, every: 4}}
"""


class Rounds(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="tessera-rounds-")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        (self.folder / "tmp").mkdir()
        (self.folder / "c.yaml").write_text(CONFIG)
        self.mark = f"ROUNDS={self.folder.name}"
        self.addCleanup(HOSTS.mend)
        self.addCleanup(self.end_all)

    def end_all(self):
        for pid in marked(self.mark):
            kill(pid, signal.SIGCONT)
            kill(pid)

    def launch(self, host, *program, nnodes="1:2", restarts=3, rejoin=REJOIN, ranks_here=1):
        run = Run(*HOSTS.command(host, BUILD / "bin/tessera", "run", "--nnodes", nnodes, "--node-rank", host, "-n", ranks_here, "--master-addr", ADDRESSES[0],
                                 "--master-port", PORT, "--max-restarts", restarts, "--restart-delay", 0.2, "--rejoin-timeout", rejoin, *program),
                  env=environment(TESSERA_SECRET="shared", TMPDIR=str(self.folder / "tmp"), XDG_RUNTIME_DIR="", ROUNDS=self.folder.name), cwd=self.folder)
        self.addCleanup(run.close)
        return run

    def train(self, host, *words, **how):
        return self.launch(host, BUILD / "bin/fault_trainer", "c.yaml", *words, **how)

    def train_both(self, *words, **how):
        return [self.train(host, *words, **how) for host in range(2)]

    def goes_on(self, run):
        """Waits for a checkpoint that is written from now on."""
        before = len(run.lines)
        run.wait_for(lambda: any("checkpoint written" in line for _, line in run.lines[before:]), 30, "training goes on")

    def undisturbed(self):
        """The weights of the same training on one host with two ranks."""
        folder = self.folder / "reference"
        folder.mkdir()
        (folder / "c.yaml").write_text((self.folder / "c.yaml").read_text())
        run = Run(BUILD / "bin/tessera", "run", "-n", 2, BUILD / "bin/fault_trainer", "c.yaml", env=environment(), cwd=folder)
        self.addCleanup(run.close)
        self.assertEqual(run.end(), 0, run.text())
        return (folder / "out.safetensors").read_bytes()

    def ended(self, runs, codes, seconds=90):
        found = [run.end(seconds) for run in runs]
        self.assertEqual(found, codes, "\n".join(run.text() for run in runs))
        end = time.monotonic() + 10
        while marked(self.mark) or list((self.folder / "tmp").iterdir()):
            self.assertLess(time.monotonic(), end, f"left behind: {marked(self.mark).keys()} {list((self.folder / 'tmp').iterdir())}")
            time.sleep(0.02)

    def kills_a_rank(self, victim):
        (self.folder / "c.yaml").write_text(CONFIG.replace(f"steps: {STEPS}", "steps: 400").replace("every: 4", "every: 20"))
        runs = self.train_both(nnodes="2")
        runs[0].wait_for_line("step +60/")
        os.kill(ranks(self.mark, "fault_trainer")[victim], signal.SIGKILL)
        self.ended(runs, [0, 0])
        for run in runs:
            self.assertRegex(run.text(), rf"restart 1 of 3, because rank {victim} \(pid \d+\) was killed by SIGKILL on node {victim} ")
        self.assertEqual((self.folder / "out.safetensors").read_bytes(), self.undisturbed())

    def test_a_lost_rank_of_node_0_restarts_both_hosts_and_the_bits_are_the_same(self):
        self.kills_a_rank(0)

    def test_a_lost_rank_of_node_1_restarts_both_hosts_and_the_bits_are_the_same(self):
        self.kills_a_rank(1)

    def test_a_lost_launcher_is_left_out_and_taken_in_again(self):
        runs = self.train_both("train.steps=1000000")
        runs[0].wait_for_line("step +8/")
        pid = ranks(self.mark, "fault_trainer")[1]
        runs[1].process.kill()
        runs[0].wait_for_line(r"round 1: 1 host, node 0; without node 1, which did not come within 4 s")
        self.assertFalse(is_running(pid), "the rank of the lost launcher")
        self.goes_on(runs[0])
        back = self.train(1, "train.steps=1000000")
        back.wait_for_line(r"round 2: 2 hosts, nodes 0, 1; node 1 has node rank 1")
        self.assertRegex(runs[0].text(), "node 1 came; all hosts start again together")
        self.goes_on(runs[0])
        runs[0].process.send_signal(signal.SIGTERM)
        self.ended([runs[0], back], [143, 143])

    def test_without_node_0_the_others_end_at_once(self):
        runs = self.train_both("train.steps=1000000")
        runs[0].wait_for_line("step +3/")
        start = time.monotonic()
        runs[0].process.kill()
        self.assertEqual(runs[1].end(30), 1, runs[1].text())
        self.assertLess(time.monotonic() - start, REJOIN + 2 + 4)
        self.assertRegex(runs[1].text(), f"node 1 lost node 0 at {ADDRESSES[0]}:{PORT + 1}: its launcher has ended; node 0 is needed")
        self.ended(runs, [137, 1])

    def test_a_cable_that_is_cut_for_good(self):
        runs = self.train_both("train.steps=1000000")
        runs[0].wait_for_line("step +3/")
        start = time.monotonic()
        HOSTS.cut()
        self.assertEqual(runs[1].end(40), 1, runs[1].text())
        self.assertLess(time.monotonic() - start, REJOIN + 2 + 6)
        self.assertRegex(runs[1].text(), rf"node 1 lost node 0 .*not heard of for {REJOIN} s \(--rejoin-timeout\)")
        runs[0].wait_for_line("round 1: 1 host, node 0; without node 1|round 1: 1 host, node 0", 40)
        runs[0].process.send_signal(signal.SIGTERM)
        self.ended(runs, [143, 1])

    def test_a_cable_that_is_cut_for_a_second_costs_time_alone(self):
        runs = self.train_both("train.steps=3000", "checkpoint.every=1000")
        runs[0].wait_for_line("step +20/")
        HOSTS.cut()
        time.sleep(1)
        HOSTS.mend()
        self.ended(runs, [0, 0])
        self.assertNotIn("round 1", runs[0].text())

    def test_a_host_that_is_late_is_waited_for(self):
        first = self.launch(1, "true", rejoin=20)
        first.wait_for(lambda: first.process.poll() is None, 5, "it runs")
        time.sleep(2)
        second = self.launch(0, "true", rejoin=20)
        self.ended([second, first], [0, 0])
        self.assertIn("round 0: 2 hosts, nodes 0, 1", first.text())

    def test_a_host_that_does_not_come_is_an_error_on_the_others(self):
        run = self.launch(0, "true", nnodes="2")
        self.ended([run], [1])
        self.assertRegex(run.text(), rf"node 1 did not come within {REJOIN} s \(--rejoin-timeout\): 1 host here, 2 or more expected \(--nnodes\)")

    def test_without_node_0_nobody_starts(self):
        run = self.launch(1, "true")
        self.ended([run], [1])
        self.assertRegex(run.text(), "node 1 lost node 0 at .*not heard of for 4 s")

    def test_other_flags_are_an_error_that_names_both(self):
        runs = [self.launch(0, "true", nnodes="2"), self.launch(1, "true", nnodes="2", ranks_here=2)]
        self.ended(runs, [1, 2])
        self.assertRegex(runs[1].text(), "flags of node 1 are .*--nproc-per-node 2.* expected those of node 0, .*--nproc-per-node 1")
        self.assertIn("other flags on node 1", runs[0].text())

    def test_a_node_rank_that_another_launcher_has_is_an_error(self):
        runs = [self.launch(host, "sleep", "60") for host in range(2)]
        runs[1].wait_for_line("round 0")
        third = self.launch(1, "true")
        self.assertEqual(third.end(20), 2, third.text())
        self.assertRegex(third.text(), "--node-rank = '1': expected a number of its own, because the launcher on host .* has it")
        self.assertIsNone(runs[0].process.poll())
        for run in runs:
            run.process.send_signal(signal.SIGTERM)
        self.ended(runs, [143, 143])


if __name__ == "__main__":
    try:
        HOSTS = TwoHosts()
    except OSError as error:
        print(f"two network namespaces cannot be made: {error}")
        sys.exit(SKIPPED)
    try:
        done = unittest.main(exit=False, verbosity=2)
    finally:
        HOSTS.remove()
    sys.exit(not done.result.wasSuccessful())
