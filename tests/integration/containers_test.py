#!/usr/bin/env python3
"""Containers refuse system calls. Training and its launcher then do without them. With real processes.

    containers_test.py BUILD_FOLDER
"""
import ctypes, errno, os, pathlib, platform, signal, struct, subprocess, sys, tempfile, unittest

BUILD = pathlib.Path(sys.argv.pop(1))
TESSERA = str(BUILD / "bin/tessera")

# Numbers on x86_64, and the argument that is compared, with its value.
MADV_COLLAPSE = 25
CALLS = {"memfd_create": (319, None), "pidfd_open": (434, None), "signalfd4": (289, None), "process_vm_readv": (310, None),
         "madvise_collapse": (28, (2, MADV_COLLAPSE)), "mbind": (237, None), "io_uring_setup": (425, None), "close_range": (436, None)}

CONFIG = """
model: {type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2}
data: {type: ByteText, path: /usr/share/common-licenses/GPL-3, seq_len: 16}
optimizer: {type: AdamW, lr: 1e-3}
parallel: {type: ZeroRedundancyOptimizer}
train: {steps: 4, global_batch: 12, save: out.safetensors}
checkpoint: {folder: run}
"""


def refuse(names, error):
    """Installs a seccomp filter in this process: the calls fail with `error`."""
    load, equal, give = 0x20, 0x15, 0x06
    allowed, refused, arch = 0x7FFF0000, 0x00050000 | error, 0xC000003E
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, allowed)]
    for name in names:
        number, argument = CALLS[name]
        program.append((load, 0, 0, 0))
        if argument is None:
            program += [(equal, 0, 1, number), (give, 0, 0, refused)]
        else:
            program += [(equal, 0, 3, number), (load, 0, 0, 16 + 8 * argument[0]), (equal, 0, 1, argument[1]), (give, 0, 0, refused)]
    program.append((give, 0, 0, allowed))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    filter_ = Program(len(program), ctypes.addressof(code))
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, ctypes.byref(filter_), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def environment():
    drop = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TESSERA_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop) and k != "OPENBLAS_CORETYPE"}
    env.update(OMP_NUM_THREADS="1")
    return env


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


if __name__ == "__main__":
    if platform.machine() != "x86_64":
        print("the numbers of system calls are those of x86_64")
        sys.exit(77)
    unittest.main()
