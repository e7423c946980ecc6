#!/usr/bin/env python3
"""Compares `tessera train` with an independent PyTorch program, with itself on other numbers of ranks and with other wrappers, and
under every installed launcher.

    train_test.py SOURCE_FOLDER BUILD_FOLDER PYTHON

PYTHON: a Python with PyTorch of any version, for the independent program and for torchrun.
"""
import json, os, pathlib, re, shutil, struct, subprocess, sys, tempfile, unittest

SOURCE, BUILD, PYTHON = pathlib.Path(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1)), sys.argv.pop(1)
TESSERA = str(BUILD / "bin/tessera")

CONFIG = """
model: {type: GPT2, vocab_size: 256, n_positions: 32, n_embd: 48, n_layer: 2, n_head: 3, seed: 3}
data: {type: ByteText, path: /usr/share/common-licenses/GPL-3, seq_len: 32, order: sequential}
optimizer: {type: AdamW, lr: 1e-3, betas: [0.9, 0.95], weight_decay: 0.1}
parallel: {type: none}
train: {steps: 30, global_batch: 12, log: log.jsonl, save: out.safetensors}
"""


def tensors(path):
    data = pathlib.Path(path).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    body = data[8 + size:]
    result = {}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "F32", entry
            begin, end = entry["data_offsets"]
            result[name.removeprefix("transformer.")] = struct.unpack(f"<{(end - begin) // 4}f", body[begin:end])
    return result


def without_key_bias(name, values):
    """Without the key bias of attention (the middle third). Its gradient is zero except for rounding, and Adam scales that to full steps."""
    third = len(values) // 3
    return values[:third] + values[2 * third:] if name.endswith("attn.c_attn.bias") else values


def environment():
    drop = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TESSERA_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop) and k != "OPENBLAS_CORETYPE"}
    env.update(OMP_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return env


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "config.yaml").write_text(CONFIG)

    def call(self, *command, ok=True, env=None, timeout=120):
        done = subprocess.run([str(c) for c in command], cwd=self.folder, env=env or environment(), capture_output=True, text=True, timeout=timeout,
                              stdin=subprocess.DEVNULL)
        if ok:
            self.assertEqual(done.returncode, 0, f"{command}\n{done.stdout}\n{done.stderr}")
        return done

    def train(self, *changes, launcher=None):
        front = launcher or [TESSERA, "train"]
        self.call(*front, "config.yaml", *changes)
        log = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        return [entry["loss"] for entry in log], tensors(self.folder / "out.safetensors"), log

    def assert_close(self, ours, theirs, tolerance):
        self.assertEqual(len(ours), len(theirs))
        for a, b in zip(ours, theirs):
            self.assertLessEqual(abs(a - b), tolerance * max(abs(b), 1e-3), f"{a} {b}")


class AgainstPyTorch(Folder):
    def reference(self, ranks):
        self.call(TESSERA, "train", "config.yaml", "train.steps=0", "train.save=init.safetensors", "train.log=null")
        self.call(PYTHON, SOURCE / "scripts/reference_gpt2.py", "--init", "init.safetensors", "--data", "/usr/share/common-licenses/GPL-3", "--steps", 30,
                  "--global-batch", 12, "--seq-len", 32, "--n-head", 3, "--lr", 1e-3, "--betas", 0.9, 0.95, "--weight-decay", 0.1, "--ranks", ranks,
                  "--log", "reference.jsonl", "--save", "reference.safetensors", timeout=240)
        losses = [json.loads(line)["loss"] for line in (self.folder / "reference.jsonl").read_text().splitlines()]
        return losses, tensors(self.folder / "reference.safetensors")

    def compare(self, ranks, *ours):
        losses, weights = self.reference(ranks)
        mine, final, _ = self.train(*ours)
        self.assert_close(mine, losses, 1e-4)
        self.assertEqual(set(final), set(weights))
        for name, values in weights.items():
            theirs, own = without_key_bias(name, values), without_key_bias(name, final[name])
            norm = sum(v * v for v in theirs) ** 0.5
            self.assertLessEqual(sum((a - b) ** 2 for a, b in zip(own, theirs)) ** 0.5, 1e-4 * norm, name)

    def test_one_process(self):
        self.compare(1)

    def test_ddp_with_zero_redundancy_optimizer(self):
        self.compare(2, "-n", "2", "parallel.type=ZeroRedundancyOptimizer")


class AgainstItself(Folder):
    def test_losses_agree_over_ranks_and_wrappers_and_bits_between_wrappers(self):
        steps = ["train.steps=50", "train.global_batch=12"]
        expected, _, log = self.train(*steps)
        self.assertEqual([entry["step"] for entry in log], list(range(50)))
        for key in ("loss", "grad_norm", "lr", "ms", "tokens_per_s"):
            self.assertIn(key, log[0])
        for ranks in (2, 3):
            same = {}
            for kind in ("DistributedDataParallel", "ZeroRedundancyOptimizer"):
                losses, weights, entries = self.train(*steps, "-n", str(ranks), f"parallel.type={kind}")
                self.assert_close(losses, expected, 1e-5)
                self.assert_close([e["grad_norm"] for e in entries], [e["grad_norm"] for e in log], 1e-3)
                same[kind] = (losses, weights)
            self.assertEqual(same["DistributedDataParallel"], same["ZeroRedundancyOptimizer"], f"bit by bit on {ranks} ranks")
            losses, _, _ = self.train(*steps, "-n", str(ranks + 1), "parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}}")
            self.assert_close(losses, expected, 1e-5)
        messages, weights, _ = self.train(*steps, "-n", "3", "parallel.type=ZeroRedundancyOptimizer", "parallel.backend=tcp", "parallel.partition=whole")
        again, others, _ = self.train(*steps, "-n", "3", "parallel.type=ZeroRedundancyOptimizer", "parallel.shard_gradients=true")
        self.assertEqual((messages, weights), (again, others), "any transport and partition")

    def test_zero_with_clipping_needs_the_memory_of_its_formula(self):
        for ranks in (1, 2, 3):
            done = self.call(TESSERA, "train", "-n", ranks, "config.yaml", "train.steps=2",
                             "parallel={type: ZeroRedundancyOptimizer}",
                             "train.clip_grad_norm=0.1", "train.clip_grad_value=0.01")
            rows = re.findall(r"(?m)^(rank \d+|formula) +([\d,]+) +([\d,]+) ", done.stdout)
            self.assertEqual(len(rows), ranks + 1, done.stdout)
            self.assertEqual(rows[-1][0], "formula")
            for name, parameters, gradients in rows:
                self.assertEqual((parameters, gradients), rows[-1][1:], name)
                self.assertGreater(int(gradients.replace(",", "")), 0)

    def test_bad_configs_end_before_training_on_every_rank(self):
        for change, words in (("train.global_batch=13", "global_batch"), ("data.path=/nowhere", "/nowhere"), ("optimizer.learning_rte=1", "learning_rte")):
            done = self.call(TESSERA, "train", "-n", "2", "config.yaml", "parallel.type=ZeroRedundancyOptimizer", change, ok=False)
            self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
            self.assertIn(words, done.stderr)
            self.assertFalse((self.folder / "log.jsonl").exists())


class Launchers(Folder):
    CHANGES = ("train.steps=4", "parallel.type=ZeroRedundancyOptimizer")

    expected = None  # the losses, from the first test

    def setUp(self):
        super().setUp()
        if Launchers.expected is None:
            Launchers.expected = self.train("-n", "2", *self.CHANGES)[0]

    def same(self, launcher):
        self.assertEqual(self.train(*self.CHANGES, launcher=launcher)[0], self.expected)

    def test_tessera_run(self):
        self.same([TESSERA, "run", "-n", "2", BUILD / "bin/tessera-train"])

    def test_torchrun(self):
        front, meeting = [PYTHON, "-m", "torch.distributed.run"], ["--standalone"]
        store = self.call(PYTHON, "-c", "import torch.distributed as d; d.TCPStore('127.0.0.1', 0, 1, True)", ok=False)
        if "without libuv support" in store.stderr:  # Debian 13's PyTorch: torchrun can meet in a file alone
            front = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *front]
            meeting = ["--local_addr", "127.0.0.1", "--rdzv_backend", "c10d", "--rdzv_id", "1", "--rdzv_conf", "store_type=file",
                       "--rdzv_endpoint", self.folder / "meeting"]
        # Redirections are spelled out because Debian 12's torchrun does not find its default under Python 3.11.
        self.same([*front, *meeting, "--nproc_per_node", "2", "-r", "1", "-t", "2", "--no_python", TESSERA, "train"])

    def test_mpirun(self):
        self.assertTrue(shutil.which("mpirun"), "openmpi-bin is installed by scripts/install_dependencies.sh")
        self.same(["mpirun", "-n", "2", "--oversubscribe", TESSERA, "train"])

    def test_by_hand(self):
        env = environment()
        env.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29871")
        ranks = [subprocess.Popen([TESSERA, "train", "config.yaml", *self.CHANGES], cwd=self.folder, env=dict(env, RANK=str(r)), stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE, text=True) for r in (1, 0)]
        for process in ranks:
            _, errors = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, errors)
        losses = [json.loads(line)["loss"] for line in (self.folder / "log.jsonl").read_text().splitlines()]
        self.assertEqual(losses, self.expected)


if __name__ == "__main__":
    unittest.main()
