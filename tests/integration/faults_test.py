#!/usr/bin/env python3
"""Survivors and the launcher must name a killed or stopped rank in time. With real processes and signals.

    faults_test.py BUILD_FOLDER
"""
import os, pathlib, re, signal, subprocess, sys, tempfile, threading, time, unittest

BUILD = pathlib.Path(sys.argv.pop(1))
RANKS, VICTIM = 3, 1
TIMEOUT_MS = 1500


class Run:
    """A launched world. Its output is read line by line with the time of arrival."""

    def __init__(self, *command):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "MASTER_", "TESSERA_"))}
        self.process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                        text=True, env=env)
        self.lines, self.pids = [], {}
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))
            found = re.search(r"pid (\d+) of rank (\d+)", line)
            if found:
                self.pids[int(found[2])] = int(found[1])

    def wait_for(self, condition, seconds, event):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds} s: {event}\n" + self.text())
            time.sleep(0.01)

    def when(self, pattern):
        return next((at for at, line in self.lines if re.search(pattern, line)), None)

    def text(self):
        return "\n".join(line for _, line in self.lines)

    def close(self):
        for pid in self.pids.values():
            try:
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self.reader.join(5)
        self.process.stdout.close()


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

    def stopped(self, backend, strategy="zero"):
        run, _ = self.lose(backend, signal.SIGSTOP, TIMEOUT_MS / 1000 + 2, strategy)
        self.assertNotEqual(run.process.wait(15), 0)
        with self.assertRaises(ProcessLookupError, msg="the stopped rank is ended too"):
            os.kill(run.pids[VICTIM], 0)

    def test_killed_gloo(self):
        self.killed("gloo")

    def test_killed_shared_memory(self):
        before = set(os.listdir("/dev/shm"))
        self.killed("shm")
        self.assertEqual(set(os.listdir("/dev/shm")) - before, set(), "no segment is left")

    def test_killed_fully_sharded(self):
        self.killed("gloo", "fsdp")
        self.killed("shm", "fsdp")

    def test_stopped_fully_sharded(self):
        self.stopped("shm", "fsdp")

    def test_ranks_in_different_branches_are_an_error_on_all(self):
        run = Run(BUILD / "bin/tessera", "run", "-n", RANKS, BUILD / "bin/fault_probe", "auto", TIMEOUT_MS, "branches")
        self.addCleanup(run.close)
        self.assertNotEqual(run.process.wait(60), 0)
        run.reader.join(5)
        for rank in range(RANKS):
            self.assertRegex(run.text(), rf"survivor {rank}: other error: .*rank 0 .*unit middle.*rank {RANKS - 1} .*unit last")

    def test_ranks_with_another_config_are_an_error_before_the_first_step(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "t.txt").write_text("a line of text\n" * 200)
            config = pathlib.Path(folder, "c.yaml")
            config.write_text(f"model: {{type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 1, n_head: 2}}\n"
                              f"data: {{type: ByteText, path: {folder}/t.txt, seq_len: 16}}\n"
                              "optimizer: {type: AdamW, lr: 1e-3}\nparallel: {type: DistributedDataParallel}\n"
                              "train: {steps: 3, global_batch: 4}\n")
            command = f"exec {BUILD}/bin/tessera-train {config} optimizer.lr=$((RANK*9+1))e-3"
            run = Run(BUILD / "bin/tessera", "run", "-n", 2, "bash", "-c", command)
            self.addCleanup(run.close)
            self.assertEqual(run.process.wait(60), 2, run.text())
            run.reader.join(5)
            self.assertEqual(len(re.findall(r"(?m)^tessera train: .*optimizer.lr: the ranks differ: 0.001 on rank 0; 0.01 on rank 1", run.text())), 1, run.text())
            self.assertNotIn("step", run.text())

    def test_stopped_gloo(self):
        self.stopped("gloo")

    def test_stopped_shared_memory(self):
        self.stopped("shm")


if __name__ == "__main__":
    unittest.main()
