#!/usr/bin/env python3
"""Containers refuse system calls, have namespaces and users of their own, and hold little memory or none that can be written. Training
and its launcher work there, with the same bits. With real processes.

    containers_test.py BUILD_FOLDER
"""
import errno, os, pathlib, platform, signal, subprocess, sys, tempfile, unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from containers import CALLS, NOBODY, refuse, surroundings, why_not
from processes import Run, environment, marked, ranks

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
TESSERA = str(BUILD / "bin/tessera")

CONFIG = """
model: {type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2}
data: {type: ByteText, path: /usr/share/common-licenses/GPL-3, seq_len: 16}
optimizer: {type: AdamW, lr: 1e-3}
parallel: {type: ZeroRedundancyOptimizer}
train: {steps: 4, global_batch: 12, save: out.safetensors}
checkpoint: {folder: run}
"""


class Containers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "c.yaml").write_text(CONFIG)

    def start(self, names, error, *words):
        process = subprocess.Popen([TESSERA, "train", "-n", "2", "c.yaml", *words], cwd=self.folder, env=environment(), stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL, start_new_session=True,
                                   preexec_fn=lambda: refuse(names, error))
        self.addCleanup(process.stdout.close)
        self.addCleanup(lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
        return process

    def weights(self, names, error):
        process = self.start(names, error, "checkpoint=null")
        text, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, f"{names} {errno.errorcode[error]}\n{text}")
        return (self.folder / "out.safetensors").read_bytes()

    def test_the_filter_refuses(self):
        code = "import os, sys\ntry: os.memfd_create('x')\nexcept OSError as e: sys.exit(e.errno)"
        done = subprocess.run([sys.executable, "-c", code], preexec_fn=lambda: refuse(["memfd_create"], errno.ENOSYS), timeout=30)
        self.assertEqual(done.returncode, errno.ENOSYS)

    def test_training_does_without_each_call(self):
        whole = self.weights([], errno.EPERM)
        for name in CALLS:
            self.assertEqual(self.weights([name], errno.EPERM), whole, name)
        for error in (errno.EPERM, errno.ENOSYS):
            self.assertEqual(self.weights(list(CALLS), error), whole)

    def test_a_killed_rank_is_named_and_a_signal_saves_without_pidfd_and_signalfd(self):
        for error in (errno.EPERM, errno.ENOSYS):
            process = self.start(["pidfd_open", "signalfd4"], error, "train.steps=1000000", "train.save=null")
            next(line for line in process.stdout if "step " in line)
            process.send_signal(signal.SIGTERM)
            text, _ = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 128 + signal.SIGTERM, text)
            self.assertIn("the same command resumes from run/step-", text)
            process = self.start(["pidfd_open", "signalfd4"], error, "train.steps=1000000", "train.save=null")
            next(line for line in process.stdout if "step " in line)
            children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            (second,) = [pid for pid in children if b"RANK=1" in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
            os.kill(int(second), signal.SIGKILL)
            text, _ = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 128 + signal.SIGKILL, text)
            self.assertRegex(text, r"root cause: rank 1 \(pid \d+\) was killed by SIGKILL")

    def test_training_does_without_proc(self):
        """In a mount namespace of its own, which ends with the process. libtorch itself finds out about vector instructions in /proc, so it may
        round otherwise."""
        if os.geteuid() != 0:
            self.skipTest("making a mount namespace needs root")
        size = len(self.weights([], errno.EPERM))
        (self.folder / "out.safetensors").unlink()
        command = f"umount -l /proc && exec {TESSERA} train -n 2 c.yaml checkpoint=null"
        done = subprocess.run(["unshare", "-m", "sh", "-c", command], cwd=self.folder, env=environment(), capture_output=True, text=True,
                              timeout=60, stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual((self.folder / "out.safetensors").stat().st_size, size)


class Surroundings(unittest.TestCase):
    """Training gives the same bits as outside, and a killed rank is named."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "c.yaml").write_text(CONFIG)

    def start(self, front, *words, **env):
        self.mark = f"FAULT_TRIAL={self.folder.name}"
        run = Run(*front, TESSERA, "train", "-n", 2, "c.yaml", *words, cwd=self.folder,
                  env=environment(**{"TMPDIR": str(self.folder), "FAULT_TRIAL": self.folder.name, **env}))
        self.addCleanup(run.close)
        self.addCleanup(lambda: [os.kill(pid, signal.SIGKILL) for pid in marked(self.mark)])
        return run

    def weights(self, front):
        run = self.start(front)
        self.assertEqual(run.end(60), 0, run.text())
        bits = (self.folder / "out.safetensors").read_bytes()
        for path in [self.folder / "out.safetensors", *self.folder.glob("run/*/*"), *self.folder.glob("run/step-*")]:
            path.rmdir() if path.is_dir() else path.unlink()
        (self.folder / "run/.lock").unlink()
        return bits

    def killed(self, front):
        run = self.start(front, "train.steps=1000000", "train.save=null", "checkpoint=null")
        run.wait_for_line("step +3/")
        os.kill(ranks(self.mark, "tessera-train")[1], signal.SIGKILL)
        self.assertEqual(run.end(30), 128 + signal.SIGKILL, run.text())
        self.assertRegex(run.text(), r"root cause: rank 1 \(pid \d+\) was killed by SIGKILL")
        run.wait_for(lambda: not marked(self.mark), 5, "no process is left")

    def check(self, name):
        front = surroundings(self.folder)[name]
        reason = why_not(front, "test", "-x", TESSERA)
        if reason:
            print(f"containers_test: NOT TRIED: {name}: {reason}", file=sys.stderr)
            self.skipTest(reason)
        outside = self.weights([])
        (self.folder / "run").rmdir()
        if name == "another user":
            os.chown(self.folder, NOBODY, NOBODY)
        self.assertEqual(self.weights(front), outside)
        self.killed(front)
        self.assertEqual([path.name for path in self.folder.iterdir() if path.name not in ("c.yaml", "run")], [])

    def test_a_pid_namespace(self):
        self.check("a pid namespace")

    def test_a_user_namespace(self):
        self.check("a user namespace")

    def test_an_ipc_namespace(self):
        self.check("an ipc namespace")

    def test_another_user(self):
        self.check("another user")

    def test_a_read_only_root(self):
        self.check("a read-only root")

    def test_little_shared_memory(self):
        self.check("64 KiB of /dev/shm")

    def test_a_root_without_any_folder_for_temporary_files_is_an_error(self):
        front = surroundings(self.folder)["a read-only root"]
        if why_not(front):
            self.skipTest(why_not(front))
        run = self.start(front, TMPDIR="/tmp", XDG_RUNTIME_DIR="/run")
        self.assertNotEqual(run.end(30), 0)
        self.assertRegex(run.text(), r"/tmp.*Read-only file system")


if __name__ == "__main__":
    if platform.machine() != "x86_64":
        print("the numbers of system calls are those of x86_64")
        sys.exit(77)
    unittest.main()
