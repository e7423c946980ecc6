#!/usr/bin/env python3
"""Survivors and the launcher must name a killed or stopped rank in time. With real processes and signals.

    faults_test.py BUILD_FOLDER
"""
import os, pathlib, re, signal, sys, tempfile, time, unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from processes import Run, is_running

BUILD = pathlib.Path(sys.argv.pop(1))
RANKS, VICTIM = 3, 1
TIMEOUT_MS = 1500


def write_config(folder, steps=3):
    pathlib.Path(folder, "t.txt").write_text("a line of text\n" * 200)
    config = pathlib.Path(folder, "c.yaml")
    config.write_text(f"model: {{type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 1, n_head: 2}}\n"
                      f"data: {{type: ByteText, path: {folder}/t.txt, seq_len: 16}}\n"
                      "optimizer: {type: AdamW, lr: 1e-3}\nparallel: {type: DistributedDataParallel}\n"
                      f"train: {{steps: {steps}, global_batch: 4}}\n")
    return config


class Faults(unittest.TestCase):
    def lose(self, backend, sig, bound, strategy="zero"):
        run = Run(BUILD / "bin/tessera", "run", "-n", RANKS, BUILD / "bin/fault_probe", backend, TIMEOUT_MS, strategy)
        self.addCleanup(run.close)
        run.wait_for(lambda: len(run.pids) == RANKS, 60, "all ranks train")
        start = time.monotonic()
        os.kill(run.pids[VICTIM], sig)
        for survivor in range(RANKS):
            if survivor == VICTIM:
                continue
            pattern = rf"survivor {survivor} blames {VICTIM}:"
            run.wait_for(lambda: run.when(pattern), bound + 5, pattern)
            self.assertLess(run.when(pattern) - start, bound, run.text())
        return run, start

    def killed(self, backend, strategy="zero"):
        run, start = self.lose(backend, signal.SIGKILL, 2.0, strategy)
        pattern = rf"rank {VICTIM} .*SIGKILL"
        run.wait_for(lambda: run.when(pattern), 5, pattern)
        self.assertLess(run.when(pattern) - start, 2.0, run.text())
        self.assertEqual(run.process.wait(10), 128 + signal.SIGKILL)

    def root_cause(self, run, rank, words):
        """The launcher has named this rank, and no other one."""
        run.reader.join(5)
        self.assertRegex(run.text(), rf"root cause: rank {rank} \(pid {run.pids[rank]}\) {words}")
        self.assertEqual(len(re.findall("it is the root cause", run.text())), 1, run.text())
        self.assertNotIn("first failure", run.text())

    def stopped(self, backend, strategy="zero"):
        run, start = self.lose(backend, signal.SIGSTOP, TIMEOUT_MS / 1000 + 2, strategy)
        self.assertEqual(run.process.wait(15), 128 + signal.SIGSTOP)
        self.assertLess(time.monotonic() - start, TIMEOUT_MS / 1000 + 6)
        self.root_cause(run, VICTIM, r"is stopped \(SIGSTOP\)")
        with self.assertRaises(ProcessLookupError, msg="the stopped rank is ended too"):
            os.kill(run.pids[VICTIM], 0)

    def continued(self, backend, victim):
        """A rank that continues when the others have ended names itself."""
        run = Run(BUILD / "bin/tessera", "run", "-n", RANKS, BUILD / "bin/fault_probe", backend, TIMEOUT_MS)
        self.addCleanup(run.close)
        run.wait_for(lambda: len(run.pids) == RANKS, 60, "all ranks train")
        os.kill(run.pids[victim], signal.SIGSTOP)
        for survivor in set(range(RANKS)) - {victim}:
            pattern = rf"survivor {survivor} blames {victim}:"
            run.wait_for(lambda: run.when(pattern), TIMEOUT_MS / 1000 + 5, pattern)
        run.wait_for(lambda: run.when(rf"rank {victim} .* is stopped"), 2, "the launcher names it")
        run.wait_for(lambda: any(not is_running(pid) for rank, pid in run.pids.items() if rank != victim), 20, "a survivor ends")
        time.sleep(0.2)  # the launcher looks at the others, and waits for them
        os.kill(run.pids[victim], signal.SIGCONT)
        run.wait_for(lambda: run.when(rf"survivor {victim} blames"), 5, "the victim gives up")
        self.assertTrue(run.when(rf"survivor {victim} blames {victim}:"), run.text())
        self.assertNotEqual(run.process.wait(15), 0)
        self.root_cause(run, victim, r"is stopped \(SIGSTOP\)")

    def test_continued_shared_memory(self):
        for victim in (0, 1):
            self.continued("shm", victim)

    def test_continued_tcp(self):
        for victim in (0, 1):
            self.continued("tcp", victim)

    def misbehave(self, how, errors, backend, words, rank=VICTIM):
        run = Run(BUILD / "bin/tessera", "run", "-n", RANKS, BUILD / "bin/fault_probe", backend, 20000, how, errors)
        self.addCleanup(run.close)
        code = run.process.wait(60)
        self.root_cause(run, rank, words)
        return code, run

    def test_an_error_that_the_ranks_caught_is_not_the_cause_of_a_later_failure(self):
        code, run = self.misbehave("recovers", "print", "auto", "exited with code 7", rank=0)
        self.assertEqual(code, 7)
        self.assertNotIn("the probe finds an error", run.text())

    def test_a_rank_that_calls_exit_is_the_cause_of_its_survivors(self):
        for backend, errors in (("shm", "print"), ("tcp", "quiet"), ("tcp", "uncaught")):
            code, _ = self.misbehave("leaves", errors, backend, "exited with code 0 while the other ranks still needed it")
            self.assertEqual(code, 134 if errors == "uncaught" else 3)

    def test_of_an_error_on_all_ranks_the_one_where_it_began_is_the_cause(self):
        for how, text in (("fails", "the probe fails on purpose"), ("agrees", "rank 1: the probe finds an error")):
            for errors, code in (("print", 4), ("quiet", 4), ("uncaught", 134)):
                words = "was killed by SIGABRT" if code == 134 else f"exited with code {code}"
                got, run = self.misbehave(how, errors, "auto", words)
                self.assertEqual(got, code)
                self.assertIn(text, run.text())

    def test_killed_gloo(self):
        self.killed("gloo")

    def test_killed_tcp(self):
        self.killed("tcp")

    def test_killed_shared_memory(self):
        before = set(os.listdir("/dev/shm"))
        self.killed("shm")
        self.assertEqual(set(os.listdir("/dev/shm")) - before, set(), "no segment is left")

    def test_killed_fully_sharded(self):
        self.killed("tcp", "fsdp")
        self.killed("shm", "fsdp")

    def test_stopped_fully_sharded(self):
        self.stopped("shm", "fsdp")

    def test_ranks_in_different_branches_train_on(self):
        run = Run(BUILD / "bin/tessera", "run", "-n", RANKS, BUILD / "bin/fault_probe", "auto", TIMEOUT_MS, "branches")
        self.addCleanup(run.close)
        self.assertEqual(run.process.wait(60), 0)

    def test_ranks_with_another_config_are_an_error_before_the_first_step(self):
        with tempfile.TemporaryDirectory() as folder:
            config = write_config(folder)
            command = f"exec {BUILD}/bin/tessera-train {config} optimizer.lr=$((RANK*9+1))e-3"
            run = Run(BUILD / "bin/tessera", "run", "-n", 2, "bash", "-c", command)
            self.addCleanup(run.close)
            self.assertEqual(run.process.wait(60), 2, run.text())
            run.reader.join(5)
            self.assertEqual(len(re.findall(r"(?m)^tessera train: .*optimizer.lr: the ranks differ: 0.001 on rank 0; 0.01 on rank 1", run.text())), 1, run.text())
            self.assertNotIn("step", run.text())

    def test_a_signal_to_one_rank_stops_the_training_and_is_no_failure(self):
        with tempfile.TemporaryDirectory() as folder:
            command = f"echo pid $$ of rank $RANK; exec {BUILD}/bin/tessera-train {write_config(folder, 10**6)} train.log_every=1"
            run = Run(BUILD / "bin/tessera", "run", "--max-restarts", 1, "-n", 2, "bash", "-c", command)
            self.addCleanup(run.close)
            run.wait_for(lambda: run.when(r"step +\d+"), 60, "the ranks train")
            os.kill(run.pids[1], signal.SIGTERM)
            self.assertEqual(run.process.wait(20), 128 + signal.SIGTERM, run.text())
            run.reader.join(5)
            self.assertRegex(run.text(), rf"SIGTERM to rank 1 \(pid {run.pids[1]}\) stopped the program")
            self.assertNotRegex(run.text(), "cause:|first failure|restart 1")

    def test_a_limit_on_memory_is_named_by_the_rank_and_by_the_launcher(self):
        with tempfile.TemporaryDirectory() as folder:
            command = f"ulimit -v 8388608; exec {BUILD}/bin/tessera-train {write_config(folder)} model.n_embd=16384 model.n_layer=8"
            run = Run(BUILD / "bin/tessera", "run", "-n", 2, "bash", "-c", command)
            self.addCleanup(run.close)
            self.assertEqual(run.process.wait(60), 2, run.text())
            run.reader.join(5)
            self.assertRegex(run.text(), r"tessera train: .*out of memory \(RLIMIT_AS 8192 MiB; peak \d+ MiB\).*can't allocate memory")
            self.assertRegex(run.text(), r"root cause: rank \d .*exited with code 2, out of memory \(RLIMIT_AS 8192 MiB; its peak \d+ MiB\)")

    def test_stopped_gloo(self):
        self.stopped("gloo")

    def test_stopped_tcp(self):
        self.stopped("tcp")

    def test_stopped_shared_memory(self):
        self.stopped("shm")


if __name__ == "__main__":
    unittest.main()
