#!/usr/bin/env python3
"""What a run checks before its first step, and how it ends when it cannot go on: the watchdog,
trials of the places that are written, data files that shrink. With real processes and signals.

    operations_test.py BUILD_FOLDER
"""
import os, pathlib, re, signal, struct, subprocess, sys, tempfile, time, unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from processes import Run

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
PROBE = BUILD / "bin/operations_probe"

CONFIG = """
model: {type: Line}
data: {type: Points, order: sequential}
loss: {type: square}
optimizer: {type: SGD, lr: 0.01}
parallel: {type: DistributedDataParallel}
train: {steps: 20, global_batch: 4, watchdog: {least: 2, other: 60}}
"""
GPT = """
model: {type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 1, n_head: 2}
data: {type: TokenBin, path: t.bin, seq_len: 16, order: sequential}
optimizer: {type: AdamW, lr: 1e-3}
train: {steps: 1000000, global_batch: 4}
checkpoint: {folder: run, every: 5}
"""


class Operations(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "c.yaml").write_text(CONFIG)

    def start(self, *command):
        run = Run(*command, cwd=self.folder)
        self.addCleanup(run.close)
        return run

    def probe(self, ranks, *overrides):
        return self.start(BUILD / "bin/tessera", "run", "-n", ranks, PROBE, "c.yaml", *overrides)

    def of_rank(self, run, rank):
        """The report of one rank's watchdog: from its first line to its last."""
        found = re.search(rf"(?s)rank {rank}: train.watchdog: no progress.*?rank {rank}: end of the stacks", run.text())
        self.assertIsNotNone(found, run.text())
        return found[0]


class Watchdog(Operations):
    def test_a_rank_that_spins_in_a_step_ends_the_job_with_all_stacks(self):
        start = time.monotonic()
        run = self.probe(2, "model.rank=1", "model.step=3")
        self.assertEqual(run.end(), 3, run.text())
        self.assertLess(time.monotonic() - start, 40)
        stuck, waits = self.of_rank(run, 1), self.of_rank(run, 0)
        self.assertIn("in step 3, forward, backward and update; expected at most 2.0 s", stuck)
        self.assertIn("rank 1: it is in no collective", stuck)
        self.assertIn("spin_for_ever", stuck + waits)
        self.assertRegex(waits, r"rank 0: it is in \w+ #\d+ of \d+ elements.*in a group of 2 ranks; it waits for rank 1")
        # Functions that are not exported have offsets.
        library = BUILD / "lib/libtessera.so"
        offsets = re.findall(r"libtessera\.so\.\d+\(\+(0x\w+)\)", waits + stuck)
        names = subprocess.run(["addr2line", "-Cfie", library, *offsets], check=True, timeout=60,
                               capture_output=True, text=True).stdout
        self.assertIn("tessera::comm::ShmControl::", names)
        self.assertEqual(len(re.findall("no progress", run.text())), 2)

    def test_a_dataset_that_hangs_is_seen_in_the_thread_that_loads(self):
        run = self.probe(2, "data.rank=0", "data.sample=20")
        self.assertEqual(run.end(), 3, run.text())
        self.assertIn("in step 5, loading the batch", self.of_rank(run, 0))
        self.assertIn("Points3get", run.text())

    def test_the_report_needs_no_memory(self):
        run = self.probe(1, "model.rank=0", "model.step=3", "model.how=exhaust")
        self.assertEqual(run.end(), 3, run.text())
        self.assertIn("spin_for_ever", self.of_rank(run, 0))

    def test_a_first_step_and_a_hook_have_a_bound_of_their_own(self):
        runs = [self.probe(1, "model.rank=0", "model.step=0", "train.watchdog.other=1"),
                self.probe(1, "hooks=[{type: Slow, step: 1000}]", "train.watchdog.other=1")]
        for run, text in zip(runs, ("in step 0, forward, backward and update; expected at most 1.0 s", "in step 1, a hook;")):
            self.assertEqual(run.end(), 3, run.text())
            self.assertIn(text, self.of_rank(run, 0))

    def test_slow_hooks_checkpoints_and_steps_are_progress(self):
        runs = [self.probe(1, "hooks=[{type: Slow, step: 2, save: 2}]", "checkpoint={folder: run, every: 1}", "train.steps=3",
                           "train.watchdog.least=0.5"),
                self.probe(1, "model.slow=0.7", "train.steps=5", "train.watchdog.least=0.1")]  # below 20 times the median
        for run in runs:
            self.assertEqual(run.end(), 0, run.text())
            self.assertNotIn("no progress", run.text())

    def test_a_rank_that_was_stopped_and_continued_goes_on(self):
        run = self.start(PROBE, "c.yaml", "model.slow=1", "train.steps=6", "train.watchdog.least=4", "train.watchdog.factor=1", "train.watchdog.other=20")
        run.wait_for_line(r"step +2/")
        time.sleep(0.3)  # into the next step, which goes on for some time after SIGCONT
        os.kill(run.process.pid, signal.SIGSTOP)
        time.sleep(7)
        os.kill(run.process.pid, signal.SIGCONT)
        self.assertEqual(run.end(), 0, run.text())
        self.assertNotIn("no progress", run.text())

    def test_a_rank_that_its_peers_gave_up_writes_its_stack_before_it_is_killed(self):
        run = self.probe(2, "model.rank=1", "model.step=3", "parallel.timeout=2", "train.watchdog.least=300")
        self.assertNotEqual(run.end(), 0, run.text())
        self.assertIn("BrokenWorldError", run.text())
        self.assertIn("spin_for_ever", self.of_rank(run, 1))

    def test_it_can_be_switched_off(self):
        run = self.probe(1, "model.rank=0", "model.step=3", "train.watchdog.least=0.2", "train.watchdog.factor=null")
        run.wait_for_line(r"step +2/")
        wrong = self.probe(1, "train.watchdog=null")
        time.sleep(4)
        self.assertIsNone(run.process.poll())
        self.assertEqual(wrong.end(), 2)
        self.assertIn("train.watchdog: null; expected a map of keys, in which factor: null", wrong.text())


class BeforeTheFirstStep(Operations):
    def refused(self, *overrides, limit=None, code=2):
        ranks = 1 if limit else 2  # start-up itself writes files and shared memory
        command = [BUILD / "bin/tessera", "run", "-n", ranks, PROBE, "c.yaml", *overrides]
        if limit is not None:
            command = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *command]
        run = self.start(*command)
        self.assertEqual(run.end(), code, run.text())
        self.assertNotRegex(run.text(), "step +0")
        return run.text()

    def test_a_save_that_cannot_work_is_refused(self):
        (self.folder / "model.safetensors").write_text("an older file")
        (self.folder / "d").mkdir()
        for key, value, limit, reason in [
                ("train.save", "model.safetensors", 1, "writing 4096 bytes at offset 0 failed: File too large"),
                ("train.log", "log.jsonl", 1, "failed: File too large"),
                ("checkpoint", "{folder: run}", 1, "failed: File too large"),
                ("train.save", "/proc/x.safetensors", None, "cannot create a file in /proc"),
                ("checkpoint", "{folder: /proc/self/fdinfo}", None, "/proc/self/fdinfo"),
                ("train.save", "d", None, "is not a regular file"),
        ]:
            with self.subTest(value):
                text = self.refused(f"{key}={value}", limit=limit)
                self.assertRegex(text, rf"(?m)^tessera train: .*{'checkpoint.folder' if key == 'checkpoint' else key}: .*{re.escape(reason)}")
        self.assertEqual((self.folder / "model.safetensors").read_text(), "an older file")

    def test_the_trial_leaves_nothing_behind(self):
        (self.folder / "m.safetensors").write_text("an older file")
        self.refused("train.save=m.safetensors", "checkpoint={folder: run}", "model.parameter=__metadata__")
        self.assertEqual((self.folder / "m.safetensors").read_text(), "an older file")
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), ["c.yaml", "m.safetensors", "run"])
        self.assertEqual([p.name for p in (self.folder / "run").iterdir()], [".lock"])

    def test_names_that_safetensors_cannot_hold_are_refused(self):
        text = self.refused("train.save=m.safetensors", "model.parameter=__metadata__")
        self.assertRegex(text, r'train\.save: safetensors: m\.safetensors: the tensor name "__metadata__" is reserved')
        text = self.refused("checkpoint={folder: run}", "model.parameter=bytes")
        self.assertRegex(text, r'checkpoint\.folder: safetensors: .*weights\.safetensors: the tensor name "w\\xff" is not valid UTF-8')
        text = self.refused("train.save=m.safetensors", "model.buffer=__metadata__")
        self.assertIn('"__metadata__" is reserved', text)
        run = self.probe(1, "model.parameter=__metadata__")  # nothing is saved
        self.assertEqual(run.end(), 0, run.text())


class Data(Operations):
    def test_a_data_file_that_shrinks_is_an_error_with_its_name(self):
        (self.folder / "c.yaml").write_text(GPT)
        tokens = 400_000
        data = self.folder / "t.bin"
        data.write_bytes(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253) + bytes(2 * tokens))
        run = self.start(BUILD / "bin/tessera", "train", "-n", 2, "c.yaml", "parallel.type=DistributedDataParallel")
        run.wait_for_line("checkpoint written to run/step-00000005")
        os.truncate(data, 5000)
        self.assertEqual(run.end(), 1, run.text())
        self.assertRegex(run.text(), r"rank \d: BatchLoader: iteration \d+: TokenBin: t\.bin was shortened from 801024 to 5000 bytes")
        self.assertTrue(list((self.folder / "run").glob("step-*")))


if __name__ == "__main__":
    unittest.main()
