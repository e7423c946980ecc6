#!/usr/bin/env python3
"""Trainings that are stopped or killed, and resumed. With real processes.

    resume_test.py BUILD_FOLDER
"""
import json, os, pathlib, random, shlex, signal, subprocess, sys, tempfile, time, unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from processes import environment

BUILD = pathlib.Path(sys.argv.pop(1))
TESSERA = str(BUILD / "bin/tessera")

CONFIG = """
model: {type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2, dropout: 0.1}
data: {type: ByteText, path: /usr/share/common-licenses/GPL-3, seq_len: 16}
optimizer: {type: AdamW, lr: 1e-3}
scheduler: {type: warmup_cosine, warmup_steps: 5}
parallel: {type: ZeroRedundancyOptimizer}
train: {steps: 400, global_batch: 12, log: log.jsonl, save: out.safetensors, eval_every: 100, ema: {decay: 0.9}}
checkpoint: {folder: run, every: 20}
"""


def without_times(path):
    lines = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("ms", "tokens_per_s", "samples_per_s")} for line in lines]


class Runs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "c.yaml").write_text(CONFIG)

    def command(self, *words, ranks=2):
        return [TESSERA, "train", "-n", str(ranks), "c.yaml", *words]

    def call(self, *words, ranks=2, code=0):
        done = subprocess.run(self.command(*words, ranks=ranks), cwd=self.folder, env=environment(), capture_output=True, text=True, timeout=120,
                              stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def start(self, *words, ranks=2):
        process = subprocess.Popen(self.command(*words, ranks=ranks), cwd=self.folder, env=environment(), stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL, start_new_session=True)
        self.addCleanup(lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
        return process

    def wait_for(self, process, text):
        """Reads until a line contains `text`."""
        for line in process.stdout:
            if text in line:
                return
        self.fail(f"no {text}")

    undisturbed = None

    def whole(self):
        """The outcome of an undisturbed run, which the first test that needs it does."""
        if Runs.undisturbed is None:
            self.call("train.log=whole.jsonl", "train.save=whole.safetensors", "checkpoint.folder=whole")
            Runs.undisturbed = without_times(self.folder / "whole.jsonl"), (self.folder / "whole.safetensors").read_bytes()
        return Runs.undisturbed

    def outcome(self):
        return without_times(self.folder / "log.jsonl"), (self.folder / "out.safetensors").read_bytes()

    def test_signals_save_and_have_their_own_codes(self):
        whole = self.whole()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) == signal.SIG_IGN:  # SIGHUP under nohup, which programs keep ignoring
                continue
            process = self.start()
            self.wait_for(process, "loss")
            process.send_signal(number)
            rest, _ = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 128 + number, rest)
            self.assertIn("the same command resumes from run/step-", rest)
        self.call()
        self.assertEqual(self.outcome(), whole)

    def test_a_run_that_diverges_ends_with_its_origin_and_saves_nothing_of_it(self):
        self.call("train.steps=20", "train.save=null")
        done = self.call("optimizer.lr=1e38", "scheduler=null", code=1)
        self.assertRegex(done.stderr, r"train.on_nonfinite: stop: step 2\d: ranks? [01].*(forward|backward|update of step 2\d): ")
        self.assertEqual(sum(line.startswith("tessera train: c.yaml") for line in done.stderr.splitlines()), 1, done.stderr)
        self.assertIn("the last sound checkpoint is run/step-00000020", done.stderr)
        self.assertEqual([path.name for path in sorted(self.folder.glob("run/step-*"))], ["step-00000020"])
        self.assertFalse((self.folder / "out.safetensors").exists())

    def test_a_signal_to_one_rank_stops_all(self):
        whole = self.whole()
        process = self.start()
        self.wait_for(process, "step ")
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (second,) = [pid for pid in children if b"RANK=1" in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
        os.kill(int(second), signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 143, rest)
        self.assertIn("the same command resumes from run/step-", rest)
        self.call()
        self.assertEqual(self.outcome(), whole)

    def test_signals_to_every_process_are_one_request_to_stop(self):
        process = self.start("train.steps=1000000", "checkpoint.every=0", "train.eval_every=0", "train.global_batch=3000")  # a step takes a while
        self.wait_for(process, "step ")
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pids in (children, (*children, process.pid)):
            for pid in pids:
                os.kill(int(pid), signal.SIGTERM)
            time.sleep(0.05)
        rest, _ = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 143, rest)
        self.assertIn("the same command resumes from run/step-", rest)

    def test_a_file_that_cannot_grow_ends_the_run_with_its_name(self):
        """As a full disk: no signal, exit code 1, and the rank that writes the file is the root cause."""
        def limited(*words):
            command = " ".join(shlex.quote(word) for word in self.command("train.save=null", *words))
            return subprocess.run(["bash", "-c", f"ulimit -f 4; exec {command}"], cwd=self.folder, env=environment(), capture_output=True, text=True,
                                  timeout=60, stdin=subprocess.DEVNULL)
        for words, text in ((("checkpoint=null", "train.steps=2000", "train.eval_every=0"), "log.jsonl: cannot write: File too large"),
                            (("train.log=null",), "model-0000")):
            done = limited(*words)
            self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
            self.assertIn(text, done.stderr)
            self.assertRegex(done.stderr, r"rank \d \(pid \d+\) exited with code 1.*; it is the root cause")
        self.assertIn("File too large", done.stderr)

    def test_closed_streams_do_not_become_files(self):
        run = f"exec {BUILD}/bin/tessera-train c.yaml parallel.type=none train.steps=8 checkpoint.every=4"
        for streams in (">&-", "<&- >&-", "<&- >&- 2>&-"):
            done = subprocess.run(["bash", "-c", f"{run} checkpoint.resume=false {streams}"], cwd=self.folder, env=environment(), timeout=60)
            self.assertEqual(done.returncode, 0, streams)
            self.assertEqual([line["step"] for line in without_times(self.folder / "log.jsonl")], list(range(8)), streams)
        self.call("train.steps=9", "parallel.type=ZeroRedundancyOptimizer", ranks=2)

    def test_killed_runs_resume_bit_by_bit(self):
        whole = self.whole()
        choice = random.Random(1)
        for _ in range(4):
            process = self.start()
            self.wait_for(process, "step ")
            time.sleep(choice.uniform(0, 0.25))
            self.assertIsNone(process.poll(), "killed in the middle of the run")
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=10)
        self.call()
        self.assertEqual(self.outcome(), whole)

    def test_a_second_signal_ends_at_once_and_loses_no_checkpoint(self):
        whole = self.whole()
        process = self.start()
        self.wait_for(process, "checkpoint written to")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        self.assertNotEqual(process.returncode, 0)
        self.call()
        self.assertEqual(self.outcome(), whole)

    def test_a_run_of_four_ranks_resumes_on_two_and_with_fsdp(self):
        self.call("train.steps=8", "model.dropout=0", ranks=4)
        straight, _ = self.from_copy("straight", "parallel.type=ZeroRedundancyOptimizer", ranks=4)
        for name, words in (("two", ("parallel.type=ZeroRedundancyOptimizer",)),
                            ("fsdp", ("parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}}",))):
            log, _ = self.from_copy(name, *words, ranks=2)
            self.assertEqual(log[0]["step"], 8)
            for a, b in zip(straight, log, strict=True):
                self.assertLess(abs(a["loss"] - b["loss"]), 1e-4 * a["loss"])

    def from_copy(self, name, *words, ranks):
        self.call("train.steps=20", "model.dropout=0", f"checkpoint={{folder: {name}, from: run/step-00000008}}", f"train.log={name}.jsonl",
                  f"train.save={name}.safetensors", *words, ranks=ranks)
        return without_times(self.folder / f"{name}.jsonl"), None

    def test_a_second_run_in_the_folder_is_refused(self):
        process = self.start("train.steps=1000000", "checkpoint.every=1000000", "train.eval_every=0")
        self.wait_for(process, "step ")
        done = self.call(code=2)
        self.assertIn("two runs cannot share a folder", done.stderr)
        self.assertRegex(done.stderr, r"pid \d+")
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)

    def test_no_checkpoint_folder(self):
        process = self.start("checkpoint=null", "train.steps=1000000", "train.eval_every=0")
        self.wait_for(process, "step ")
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 143, rest)
        self.assertIn("no checkpoint.folder", rest)
        self.assertTrue((self.folder / "out.safetensors").exists(), "the weights were saved")


if __name__ == "__main__":
    unittest.main()
