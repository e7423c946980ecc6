#!/usr/bin/env python3
"""Weights in and out: `tessera weights`, folders of Hugging Face in `tessera train`, and every snippet of
docs/weights.md. Needs the Python of the PyTorch under test.

    weights_test.py SOURCE_FOLDER BUILD_FOLDER
"""
import json, os, pathlib, re, struct, subprocess, sys, tempfile, unittest

import numpy, torch

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from processes import Server

SOURCE, BUILD = (pathlib.Path(sys.argv.pop(1)).resolve() for _ in range(2))
PAGE = (SOURCE / "docs/weights.md").read_text()
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK")}
ENVIRONMENT.update(PATH=f"{BUILD}/bin:{os.environ['PATH']}", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
SERVER = Server(BUILD / "bin/cli_server", ENVIRONMENT)

CONFIG = """
model: {type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2, dropout: 0, init: hf}
data: {type: ByteText, path: /usr/share/common-licenses/GPL-3, seq_len: 16}
optimizer: {type: AdamW, lr: 1e-3}
parallel: {type: FullyShardedDataParallel}
train: {steps: 0, global_batch: 2, eval_batches: 1, save: out/}
"""
DTYPES = {"F32": numpy.float32, "I64": numpy.int64}


def gpt2():
    """Random weights with the names of transformers' GPT-2."""
    random = numpy.random.default_rng(5)
    block = {"ln_1.weight": [16], "ln_1.bias": [16], "attn.c_attn.weight": [16, 48], "attn.c_attn.bias": [48],
             "attn.c_proj.weight": [16, 16], "attn.c_proj.bias": [16], "ln_2.weight": [16], "ln_2.bias": [16],
             "mlp.c_fc.weight": [16, 64], "mlp.c_fc.bias": [64], "mlp.c_proj.weight": [64, 16], "mlp.c_proj.bias": [16]}
    shapes = {"wte.weight": [256, 16], "wpe.weight": [16, 16], "ln_f.weight": [16], "ln_f.bias": [16],
              **{f"h.{i}.{name}": shape for i in range(2) for name, shape in block.items()}}
    return {f"transformer.{n}": random.normal(size=s).astype(numpy.float32) for n, s in shapes.items()}


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + tensor.nbytes]}
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return {name: numpy.frombuffer(data[8 + size + e["data_offsets"][0]:8 + size + e["data_offsets"][1]], DTYPES[e["dtype"]]).reshape(e["shape"])
            for name, e in header.items()}


def read_folder(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {}
    for name in sorted(set(index["weight_map"].values())):
        part = read_safetensors(folder / name)
        assert all(index["weight_map"][t] == name for t in part)
        tensors.update(part)
    assert sorted(tensors) == sorted(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    return tensors, sorted(set(index["weight_map"].values()))


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_(self, *words, code=0):
        """`tessera weights` and trainings of one rank run in the server, as the programs that `tessera` replaces itself with."""
        if words[:2] == ("tessera", "weights") or words[:4] == ("tessera", "train", "-n", 1):
            done = SERVER.call(f"tessera-{words[1]}", *words[4 if words[1] == "train" else 2:], cwd=self.folder)
        else:
            done = subprocess.run([str(w) for w in words], cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
        self.assertEqual(done.returncode, code, f"{words}\n{done.stdout}\n{done.stderr}")
        return done.stdout + done.stderr

    def equal(self, one, two):
        self.assertEqual(sorted(one), sorted(two))
        for name in one:
            self.assertEqual(one[name].tobytes(), two[name].tobytes(), name)

    def write_hf(self, tensors, folder="hf"):
        """A folder with three shards, a config and files of a tokenizer."""
        hf = self.folder / folder
        hf.mkdir()
        names = sorted(tensors)
        cuts = [names[:9], names[9:20], names[20:]]
        files = [f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]
        for file, cut in zip(files, cuts):
            write_safetensors(hf / file, {n: tensors[n] for n in cut})
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
                 "weight_map": {n: f for f, cut in zip(files, cuts) for n in cut}}
        (hf / "model.safetensors.index.json").write_text(json.dumps(index))
        (hf / "config.json").write_text('{"model_type": "gpt2", "own": 1}')
        (hf / "tokenizer.json").write_text("{}")
        return hf


class Trainer(Folder):
    def setUp(self):
        super().setUp()
        (self.folder / "c.yaml").write_text(CONFIG)
        self.tensors = gpt2()

    def train(self, *words, ranks=2, code=0):
        return self.run_("tessera", "train", "-n", 1 if code else ranks, "c.yaml", *words, code=code)

    def test_a_folder_with_three_shards_goes_in_and_out(self):
        self.write_hf(self.tensors)
        text = self.train("train.max_shard_mb=0")
        out, files = read_folder(self.folder / "out")
        self.equal(self.tensors, out)
        self.assertEqual(len(files), 2, "a file for each rank")
        self.assertEqual((self.folder / "out/config.json").read_text(), '{"model_type": "gpt2", "own": 1}')
        self.assertIn("tokenizer.json copied from hf", text)

    def test_the_files_of_a_folder_have_a_greatest_size(self):
        """All ranks write them; what they hold does not depend on the ranks."""
        model = ["model.init=null", "model.n_embd=128", "model.n_layer=3", "train.global_batch=6"]
        self.train(*model, "train.save=whole.safetensors", "parallel.type=none", ranks=1)
        whole = read_safetensors(self.folder / "whole.safetensors")
        for ranks, count in ((2, 4), (3, 3)):
            self.train(*model, "train.max_shard_mb=1", f"train.save=out{ranks}/", ranks=ranks)
            out, files = read_folder(self.folder / f"out{ranks}")
            self.equal(whole, out)
            self.assertEqual(files, [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)])
            for file in files:
                self.assertLessEqual(sum(t.nbytes for t in read_safetensors(self.folder / f"out{ranks}" / file).values()), 1_000_000)
            # The folder is read again on another number of ranks.
            self.train(*model, f"model.init=out{ranks}", "train.save=again.safetensors", ranks=5 - ranks)
            self.equal(whole, read_safetensors(self.folder / "again.safetensors"))

    def test_torch_files_in_and_out(self):
        torch.save({"model": {"module." + n: torch.tensor(t) for n, t in self.tensors.items()}, "ema": {"x": torch.ones(1)},
                    "epoch": 3}, self.folder / "c.pt")
        rule = "model.key_map=[{pattern: '^module\\.', replacement: ''}]"
        self.train("model.init=c.pt", "model.init_key=model", rule, "train.save=out.pt")
        out = torch.load(self.folder / "out.pt", weights_only=True)
        self.equal(self.tensors, {n: t.numpy() for n, t in out.items()})
        text = self.train("model.init=c.pt", "train.save=out.pt", code=2)
        self.assertIn('several dicts of tensors; name the one with the weights: its dicts are "model", "ema"', text)

    def test_names_that_do_not_match(self):
        wrong = dict(self.tensors)
        wrong["transformer.h.7.extra"] = wrong.pop("transformer.ln_f.bias")
        write_safetensors(self.folder / "w.safetensors", wrong)
        text = self.train("model.init=w.safetensors", code=2)
        self.assertIn("1 missing", text)
        text = self.train("model.init=w.safetensors", "model.strict=false")
        self.assertIn("model.init: 1 missing names, which keep their initial values: transformer.ln_f.bias", text)
        self.assertIn("model.init: 1 unexpected names, which are not read: transformer.h.7.extra", text)
        text = self.train("model.init=w.safetensors", "model.key_map=[{pattern: '(', replacement: ''}]", code=2)
        self.assertIn("no regular expression", text)
        text = self.train("model.init=w.safetensors", "model.key_map=[{pattern: '.*', replacement: 'a'}]", code=2)
        self.assertIn("the same name", text)

    def test_the_folder_that_is_read_is_not_written(self):
        hf = self.folder / "hf"
        hf.mkdir()
        write_safetensors(hf / "model.safetensors", self.tensors)
        self.assertIn("model.init reads it; expected a file of its own", self.train("train.save=hf/", code=2))
        self.assertEqual([file.name for file in hf.iterdir()], ["model.safetensors"])

    def test_other_kinds_of_files_are_named(self):
        for begin, words in ((b"GGUF", "GGUF"), (b"version https://git-lfs.github.com", "git lfs pull"), (b"<!DOCTYPE", "HTML"),
                             (b"\x80\x04K\x01.", "plain pickle")):
            (self.folder / "x").write_bytes(begin + b" " * 600)
            self.assertIn(words, self.train("model.init=x", ranks=1, code=2))


CLASSIFIER = """
model: {type: ImageClassifier, in_channels: 1, channels: 2, blocks: 1, classes: 3, norm: none, init: in.pt}
data: {type: Npy, inputs: x.npy, targets: y.npy, order: sequential}
optimizer: {type: torch.AdamW, lr: 0.01, betas: [0.8, 0.9], eps: 1e-6, weight_decay: 0.1, init: in.pt}
train: {steps: 2, global_batch: 12, save: out.pt, save_optimizer: state.pt}
"""


class Tensors(torch.nn.Module):
    """A module with the parameters given."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape) / 3))


class Classifier(torch.nn.Module):
    """ImageClassifier with one block and without norms, operator by operator."""

    def __init__(self):
        super().__init__()
        self.stem = Tensors(weight=[2, 1, 3, 3])
        self.stem_norm = Tensors(bias=[2])
        block = torch.nn.Module()
        block.conv1, block.norm1 = Tensors(weight=[2, 2, 3, 3]), Tensors(bias=[2])
        block.conv2, block.norm2 = Tensors(weight=[2, 2, 3, 3]), Tensors(bias=[2])
        self.blocks = torch.nn.ModuleList([block])
        self.head = Tensors(weight=[3, 2], bias=[3])

    def forward(self, images):
        def convolved(x, convolution, norm):
            return torch.conv2d(x, convolution.weight, None, 1, 1) + norm.bias.view(-1, 1, 1)
        block = self.blocks[0]
        x = torch.relu(convolved(images, self.stem, self.stem_norm))
        y = convolved(torch.relu(convolved(x, block.conv1, block.norm1)), block.conv2, block.norm2)
        return torch.nn.functional.linear(torch.relu(y + x).mean((2, 3)), self.head.weight, self.head.bias)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)


def train_in_python(model, optimizer, images, labels, ranks):
    """Two steps of 12 samples, with the mean of the gradients of `ranks` parts of them."""
    for x, y in zip(images.split(12), labels.split(12)):
        sums = None
        for part, targets in zip(x.chunk(ranks), y.chunk(ranks)):
            loss = torch.nn.functional.cross_entropy(model(part), targets)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            sums = gradients if sums is None else [a + b for a, b in zip(sums, gradients)]
        for parameter, total in zip(model.parameters(), sums):
            parameter.grad = total * (1 / ranks)
        optimizer.step()


class OptimizerState(Folder):
    def setUp(self):
        super().setUp()
        (self.folder / "c.yaml").write_text(CLASSIFIER)
        torch.manual_seed(3)
        self.model = Classifier()
        self.optimizer = adamw(self.model)
        self.images, self.labels = torch.randn(3, 24, 1, 6, 6), torch.randint(3, [3, 24])
        numpy.save(self.folder / "x.npy", self.images[1].numpy())
        numpy.save(self.folder / "y.npy", self.labels[1].numpy())

    def save(self):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": 1}, self.folder / "in.pt")

    def train(self, *words, ranks=1, code=0):
        return self.run_("tessera", "train", "-n", ranks, "c.yaml", *words, code=code)

    def loaded_model(self):
        model = Classifier()
        model.load_state_dict(torch.load(self.folder / "out.pt", weights_only=True))
        return model

    def loaded(self):
        model = self.loaded_model()
        optimizer = adamw(model)
        optimizer.load_state_dict(torch.load(self.folder / "state.pt"))
        return model, optimizer

    def same_bits(self, one, two):
        """Of models and optimizers, in pairs."""
        for a, b in zip(one[0].parameters(), two[0].parameters()):
            self.assertEqual(a.detach().numpy().tobytes(), b.detach().numpy().tobytes())
        first, second = one[1].state_dict()["state"], two[1].state_dict()["state"]
        self.assertEqual(sorted(first), sorted(second))
        for number, state in first.items():
            self.assertEqual(float(state["step"]), float(second[number]["step"]))
            for name in ("exp_avg", "exp_avg_sq"):
                self.assertEqual(state[name].numpy().tobytes(), second[number][name].numpy().tobytes(), name)

    def test_python_then_tessera_then_python(self):
        """Is bit by bit the training in Python alone, where Python's AdamW computes as the C++ one."""
        for ranks, wrapper in ((1, "none"), (2, "ZeroRedundancyOptimizer"), (2, "FullyShardedDataParallel"), (3, "DistributedDataParallel")):
            torch.manual_seed(7)
            self.model = Classifier()
            self.optimizer = adamw(self.model)
            train_in_python(self.model, self.optimizer, self.images[0], self.labels[0], ranks)
            self.save()
            text = self.train(f"parallel.type={wrapper}", ranks=ranks)
            self.assertNotIn("warning", text)
            mixed = self.loaded()
            train_in_python(*mixed, self.images[2], self.labels[2], ranks)
            for part in (1, 2):
                train_in_python(self.model, self.optimizer, self.images[part], self.labels[part], ranks)
            if torch.__version__.startswith("1.13"):
                self.same_bits(mixed, (self.model, self.optimizer))
            for a, b in zip(mixed[0].parameters(), self.model.parameters()):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            self.assertEqual(float(mixed[1].state_dict()["state"][0]["step"]), 6)

    def test_every_bit_survives(self):
        """Without a step, on any number of ranks, with the fused AdamW, and in a second round. The parameters share a storage, and one of them is
        stored with other strides."""
        flat = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        for parameter, part in zip(self.model.parameters(), flat.split([p.numel() for p in self.model.parameters()])):
            parameter.data = part.view(parameter.shape)
        convolution = self.model.blocks[0].conv2.weight
        convolution.data = convolution.data.to(memory_format=torch.channels_last)
        train_in_python(self.model, self.optimizer, self.images[0], self.labels[0], 1)
        self.save()
        for ranks, wrapper in ((2, "FullyShardedDataParallel"), (3, "ZeroRedundancyOptimizer"), (2, "DistributedDataParallel")):
            self.train(f"parallel.type={wrapper}", "train.steps=0", "optimizer.type=AdamW", ranks=ranks)
            self.same_bits(self.loaded(), (self.model, self.optimizer))
            options = self.loaded()[1].param_groups[0]
            self.assertEqual((options["lr"], tuple(options["betas"]), options["eps"], options["weight_decay"]), (0.01, (0.8, 0.9), 1e-6, 0.1))
        self.train("train.steps=0", "model.init=out.pt", "optimizer.init=state.pt", "train.save=second.pt", "train.save_optimizer=second_state.pt")
        one, two = (torch.load(self.folder / f) for f in ("state.pt", "second_state.pt"))
        self.assertEqual(sorted(one["state"]), sorted(two["state"]))
        for number in one["state"]:
            self.assertTrue(all(one["state"][number][k].equal(two["state"][number][k]) for k in one["state"][number]))

    def test_groups_and_frozen_parameters(self):
        """Groups of the config are those of Python in the same order; frozen parameters have no state."""
        biases = [p for n, p in self.model.named_parameters() if n.endswith("bias")]
        weights = [p for n, p in self.model.named_parameters() if n.endswith("weight")]
        self.optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0}],
                                           lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
        train_in_python(self.model, self.optimizer, self.images[0], self.labels[0], 1)
        self.save()
        text = self.train("train.steps=0", "optimizer.paramwise={bias_decay_mult: 0}")
        self.assertNotIn("warning", text)
        out, before = torch.load(self.folder / "state.pt"), self.optimizer.state_dict()
        self.assertEqual([g["params"] for g in out["param_groups"]], [g["params"] for g in before["param_groups"]])
        self.assertEqual([g["weight_decay"] for g in out["param_groups"]], [0.1, 0])
        for number, state in before["state"].items():
            self.assertTrue(all(state[k].equal(out["state"][number][k]) for k in ("exp_avg", "exp_avg_sq")))
        text = self.train("train.steps=0", code=2)
        self.assertIn("its parameter groups have 4, 4 parameters; expected 8", text)
        # One group of all parameters, of which three are frozen now: the others keep their state.
        self.optimizer = adamw(self.model)
        train_in_python(self.model, self.optimizer, self.images[0], self.labels[0], 1)
        self.save()
        for wrapper in ("{type: ZeroRedundancyOptimizer}", "{type: FullyShardedDataParallel}",
                        "{type: FullyShardedDataParallel, ignored_parameters: [head.weight, head.bias]}"):
            self.train("train.steps=0", "model.freeze=[blocks.0.conv1.weight, head.*]", f"parallel={wrapper}", ranks=2)
            state = torch.load(self.folder / "state.pt")
            kept = [i for i, (n, _) in enumerate(self.model.named_parameters()) if n != "blocks.0.conv1.weight" and "head" not in n]
            self.assertEqual(state["param_groups"][0]["params"], [0, 1, 2, 3, 4])
            for a, b in zip(self.loaded_model().parameters(), self.model.parameters()):
                self.assertTrue(a.equal(b), wrapper)
            for number, before in enumerate(kept):
                self.assertTrue(state["state"][number]["exp_avg"].equal(self.optimizer.state_dict()["state"][before]["exp_avg"]))

    def test_what_does_not_fit(self):
        train_in_python(self.model, self.optimizer, self.images[0], self.labels[0], 1)
        self.save()
        text = self.train("optimizer.lr=0.02", "train.steps=0")
        self.assertIn("warning: optimizer.init: lr of group 0 is 0.01 in in.pt and 0.02 in the config, which counts", text)
        self.assertIn("is not the state of Adagrad", self.train("optimizer={type: Adagrad, lr: 0.1, init: in.pt}", code=2))
        self.assertIn('has no dict at "ema"', self.train("optimizer.init_key=ema", code=2))
        write_safetensors(self.folder / "w.safetensors", {"a": numpy.zeros(4, numpy.float32)})
        self.assertIn("is a safetensors file; expected a file of torch.save", self.train("optimizer.init=w.safetensors", code=2))
        self.assertIn("0 dicts with state and param_groups", self.train("optimizer.init=w.pt", code=2)
                      if torch.save(self.model.state_dict(), self.folder / "w.pt") is None else "")
        self.assertIn("optimizer.init: none.pt: No such file", self.train("optimizer.init=none.pt", code=2))
        self.assertIn("expected a name that ends in .pt", self.train("train.save_optimizer=state.safetensors", code=2))
        self.assertIn("expected one of the two", self.train("train.ema.decay=0.9", code=2))
        self.assertIn("optimizer.init reads it", self.train("model.init=null", "train.save_optimizer=in.pt", code=2))
        other = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(other.parameters())
        torch.save(optimizer.state_dict(), self.folder / "other.pt")
        self.assertIn("have 2 parameters; expected 8", self.train("optimizer.init=other.pt", code=2))
        decoupled = self.optimizer.state_dict()
        for group in decoupled["param_groups"]:
            group["decoupled_weight_decay"] = True  # as PyTorch 2.7 writes it
        torch.save(decoupled, self.folder / "decoupled.pt")
        self.assertIn("expected optimizer.type AdamW, given is Adam",
                      self.train("optimizer={type: Adam, lr: 0.01, init: decoupled.pt}", code=2))
        shapes = self.optimizer.state_dict()
        shapes["state"][0]["exp_avg"] = torch.ones(5)
        torch.save(shapes, self.folder / "shapes.pt")
        self.assertIn("stem.weight", self.train("optimizer.init=shapes.pt", code=2))


class CommandLine(Folder):
    def test_any_kind_into_any_kind(self):
        tensors = gpt2()
        self.write_hf(tensors)
        self.run_("tessera", "weights", "convert", "hf", "a.pt")
        self.equal(tensors, {n: t.numpy() for n, t in torch.load(self.folder / "a.pt", weights_only=True).items()})
        self.run_("tessera", "weights", "convert", "a.pt", "b.safetensors")
        self.equal(tensors, read_safetensors(self.folder / "b.safetensors"))
        self.run_("tessera", "weights", "convert", "b.safetensors", "d/", "--max-shard-size", "12KB")
        out, files = read_folder(self.folder / "d")
        self.equal(tensors, out)
        self.assertGreater(len(files), 3)
        # One tensor has more than the limit, and is alone in its file.
        self.assertTrue(all(sum(t.nbytes for t in read_safetensors(self.folder / "d" / f).values()) <= 12000
                            or len(read_safetensors(self.folder / "d" / f)) == 1 for f in files))
        (self.folder / "hf/pytorch_model.bin").write_bytes(b"older weights")
        self.run_("tessera", "weights", "convert", "hf", "e/")
        self.assertEqual(sorted(f.name for f in (self.folder / "e").iterdir()),
                         ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"])
        (self.folder / "hf/config.json").write_text('{"model_type": "gpt2", "dtype": "float32", "own": 1}')
        self.run_("tessera", "weights", "convert", "hf", "f/", "--dtype", "bfloat16")
        self.assertEqual(json.loads((self.folder / "f/config.json").read_text()), {"model_type": "gpt2", "dtype": "bfloat16", "own": 1})
        self.assertIn("0 of 28 tensors differ", self.run_("tessera", "weights", "diff", "hf", "d/"))
        self.assertIn("another folder", self.run_("tessera", "weights", "convert", "hf", "hf/", code=2))
        part = self.folder / "hf/model-00002-of-00003.safetensors"
        before = part.read_bytes()
        text = self.run_("tessera", "weights", "convert", "hf", part, code=2)
        self.assertIn("another file", text)
        self.assertEqual(part.read_bytes(), before)

    def test_values_that_a_dtype_cannot_hold_are_an_error(self):
        write_safetensors(self.folder / "w.safetensors", {
            "a": numpy.float32([1, 70000]), "b": numpy.float32([numpy.inf, numpy.nan])})
        convert = ("tessera", "weights", "convert", "w.safetensors")
        text = self.run_(*convert, "half.safetensors", "--dtype", "float16", code=2)
        self.assertIn('w.safetensors: tensor "a" has values that do not fit into Half, which '
                      'makes infinity in 1 of 2 elements', text)
        self.assertFalse((self.folder / "half.safetensors").exists())
        self.run_(*convert, "brain.safetensors", "--dtype", "bfloat16")

    def test_a_folder_holds_one_save(self):
        old, new = gpt2(), {name: tensor + 1 for name, tensor in gpt2().items()}
        write_safetensors(self.folder / "new.safetensors", new)
        out = self.folder / "out"
        out.mkdir()
        write_safetensors(out / "model.safetensors", old)
        for size, more in (("12KB", True), ("1GB", False)):
            self.run_("tessera", "weights", "convert", "new.safetensors", "out/", "--max-shard-size", size)
            tensors, files = read_folder(out)
            self.equal(new, tensors)
            self.assertEqual(len(files) > 3, more)
            self.assertEqual(sorted(file.name for file in out.iterdir()), [*files, "model.safetensors.index.json"])
        # As in other libraries the single file counts, not the index.
        self.run_("tessera", "weights", "convert", "new.safetensors", "out/model.safetensors", "--map", "^=single.")
        text = self.run_("tessera", "weights", "inspect", "out")
        self.assertIn("out/model.safetensors is read, as by Hugging Face's libraries; out/model.safetensors.index.json is there, too", text)
        self.assertIn(" single.transformer.wte.weight", text)
        torch.save({}, self.folder / "empty.pt")
        self.assertIn("has no tensors", self.run_("tessera", "weights", "convert", "empty.pt", "none/", code=2))
        self.assertFalse((self.folder / "none").exists())

    def test_a_folder_of_torch_files_counts_shared_elements_once(self):
        """As huggingface_hub writes it for a model with tied weights."""
        weight = torch.arange(8.0)
        hub = self.folder / "hub"
        hub.mkdir()
        torch.save({"head": weight, "embedding": weight}, hub / "pytorch_model-00001-of-00002.bin")
        torch.save({"bias": torch.ones(2)}, hub / "pytorch_model-00002-of-00002.bin")
        places = {"head": 1, "embedding": 1, "bias": 2}
        for total, wrong in ((40, False), (72, False), (73, True)):
            index = {"metadata": {"total_size": total}, "weight_map": {name: f"pytorch_model-0000{i}-of-00002.bin" for name, i in places.items()}}
            (hub / "pytorch_model.bin.index.json").write_text(json.dumps(index))
            text = self.run_("tessera", "weights", "inspect", "hub")
            self.assertIn("3 tensors", text)
            self.assertEqual("total_size of hub/pytorch_model.bin.index.json is 73" in text, wrong)

    def test_a_private_file_is_not_copied_through_a_link(self):
        tensors = gpt2()
        hf = self.write_hf(tensors)
        (self.folder / "private").mkdir()
        (self.folder / "private/key").write_text("secret")
        (self.folder / "private/config.json").write_text('{"dtype": "float32", "secret": 1}')
        (hf / "notes.txt").symlink_to("../private/key")
        (hf / "absolute.txt").symlink_to(self.folder / "private/key")
        (hf / "chain.txt").symlink_to("notes.txt")
        (hf / "folder").symlink_to(self.folder / "private")
        (hf / "nowhere.txt").symlink_to("missing")
        (hf / "same.json").symlink_to("tokenizer.json")
        (hf / "config.json").unlink()
        (hf / "config.json").symlink_to("../private/config.json")
        text = self.run_("tessera", "weights", "convert", "hf", "out/", "--dtype", "bfloat16")
        self.assertEqual(sorted(f.name for f in (self.folder / "out").iterdir()),
                         ["model-00001-of-00001.safetensors", "model.safetensors.index.json", "same.json", "tokenizer.json"])
        for name in ("notes.txt", "absolute.txt", "chain.txt", "config.json"):
            self.assertRegex(text, rf"hf/{name} is not copied: it is a link to {self.folder}/private/[a-z.]+, outside of its folder")
        (self.folder / "c.yaml").write_text(CONFIG)
        text = self.run_("tessera", "train", "-n", 1, "c.yaml", "parallel.type=none", "train.save=trained/")
        self.assertFalse((self.folder / "trained/notes.txt").exists())
        self.assertTrue((self.folder / "trained/same.json").exists())

    def test_the_links_of_hugging_faces_cache_are_followed(self):
        hf = self.write_hf(gpt2())
        snapshot, blobs = self.folder / "models--x/snapshots/1", self.folder / "models--x/blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for file in hf.iterdir():
            file.rename(blobs / f"blob-{file.name}")
            (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
        (self.folder / "private").mkdir()
        (self.folder / "private/key").write_text("secret")
        (snapshot / "notes.txt").symlink_to("../../blobs/key")
        (blobs / "key").symlink_to("../../private/key")
        text = self.run_("tessera", "weights", "convert", snapshot, "out/")
        self.assertEqual(sorted(f.name for f in (self.folder / "out").iterdir()),
                         ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"])
        self.assertEqual(text.count("is a link to"), 1)
        # A folder that only calls itself blobs.
        for file in blobs.iterdir():
            file.rename(self.folder / "private" / file.name)
        blobs.rmdir()
        blobs.symlink_to("../private")
        self.run_("tessera", "weights", "convert", snapshot, "more/")
        self.assertEqual(sorted(f.name for f in (self.folder / "more").iterdir()), ["model-00001-of-00001.safetensors", "model.safetensors.index.json"])

    def test_a_hostile_archive_does_not_run(self):
        code = """
import torch
from typing import Tuple
class Script(torch.nn.Module):
    def __init__(self, path: str):
        super().__init__()
        self.path, self.weight = path, torch.nn.Parameter(torch.ones(2))
    @torch.jit.export
    def __getstate__(self) -> Tuple[str, bool]:
        return (self.path, self.training)
    @torch.jit.export
    def __setstate__(self, state: Tuple[str, bool]):
        self.path, self.weight, self.training = state[0], torch.ones(2), state[1]
        torch.save(torch.ones(1), state[0])
    def forward(self, x):
        return x * self.weight
"""
        (self.folder / "script.py").write_text(code + "torch.jit.script(Script('own.sh')).save('model.safetensors')\n")
        self.run_(sys.executable, "script.py")
        (self.folder / "own.sh").write_text("mine")
        for words in (["inspect", "model.safetensors"], ["inspect", "."], ["convert", "model.safetensors", "out.safetensors"],
                      ["diff", "model.safetensors", "model.safetensors"]):
            self.assertIn("model.safetensors: is a TorchScript archive with the class", self.run_("tessera", "weights", *words, code=2))
            self.assertEqual((self.folder / "own.sh").read_text(), "mine")
        self.assertFalse((self.folder / "out.safetensors").exists())
        self.run_(sys.executable, "-c", "import torch; torch.jit.load('model.safetensors')")
        self.assertNotEqual((self.folder / "own.sh").read_bytes(), b"mine", "libtorch runs it")

    def test_dtypes_keep_their_names(self):
        names = {"F32": "float32", "F64": "float64", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
                 "I8": "int8", "U8": "uint8", "BOOL": "bool"}
        values = {entry: torch.tensor([1.0, 0, 1]).to(getattr(torch, name)) for entry, name in names.items()}
        torch.save(values, self.folder / "in.pt")
        text = self.run_("tessera", "weights", "inspect", "in.pt")
        for entry in names:
            self.assertRegex(text, rf"(?m) {entry} +\[3\].* {entry}$")
        self.run_("tessera", "weights", "convert", "in.pt", "out.safetensors")
        self.run_("tessera", "weights", "convert", "out.safetensors", "out.pt", "--dtype", "bfloat16")
        for entry, value in torch.load(self.folder / "out.pt").items():
            expected = values[entry].to(torch.bfloat16) if values[entry].is_floating_point() else values[entry]
            self.assertEqual(expected.dtype, value.dtype)
            self.assertTrue(expected.equal(value))

    def test_dtypes_that_this_libtorch_lacks(self):
        for name, last in (("1", 7), ("2", 7), ("3", 9)):
            header = json.dumps({"x": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode()
            (self.folder / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([5, last]))
        text = self.run_("tessera", "weights", "inspect", "1.safetensors")
        self.assertRegex(text, r"[0-9a-f]{32}  F8_E8M0  \[2\]  2 bytes  x")
        self.run_("tessera", "weights", "diff", "1.safetensors", "2.safetensors")
        self.assertIn("x  1 bytes differ", self.run_("tessera", "weights", "diff", "1.safetensors", "3.safetensors", code=1))
        self.assertIn("cannot hold", self.run_("tessera", "weights", "convert", "1.safetensors", "4.pt", code=2))

    def test_differences(self):
        base = {"a": numpy.zeros(4, numpy.float32), "b": numpy.ones(3, numpy.float32), "same": numpy.ones(2, numpy.float32)}
        other = {"a": numpy.array([0, 0, -0.25, 0.125], numpy.float32), "b": numpy.ones((3, 1), numpy.float32), "same": base["same"],
                 "more": base["b"]}
        write_safetensors(self.folder / "1.safetensors", base)
        write_safetensors(self.folder / "2.safetensors", other)
        text = self.run_("tessera", "weights", "diff", "1.safetensors", "2.safetensors", code=1)
        self.assertIn("a  largest difference 0.25, 2 elements differ", text)
        self.assertIn("b  F32 [3] and F32 [3, 1]", text)
        self.assertIn("more  only in the second", text)
        self.assertIn("3 of 4 tensors differ", text)
        self.assertNotIn("same", text)
        one, two = (numpy.array([numpy.nan, 1, x], numpy.float32) for x in (2, 3))
        write_safetensors(self.folder / "3.safetensors", {"n": one})
        write_safetensors(self.folder / "4.safetensors", {"n": two})
        self.assertIn("n  largest difference 1, 1 elements differ", self.run_("tessera", "weights", "diff", "3.safetensors", "4.safetensors", code=1))
        self.run_("tessera", "weights", "convert", "4.safetensors", "5.safetensors", "--map", "^n$=m", "--map", "^m$=k")
        self.assertEqual(sorted(read_safetensors(self.folder / "5.safetensors")), ["k"], "rules apply in order, each to the last one's result")
        for pair, found in ((([2**62 + 1, 5], [2**62, 5]), "largest difference 1, 1 elements"), (([-(2**62)], [2**62]), "9.22337e+18, 1 elem")):
            for name, value in zip("67", pair):
                torch.save({"n": torch.tensor(value)}, self.folder / f"{name}.pt")
            self.assertIn(found, self.run_("tessera", "weights", "diff", "6.pt", "7.pt", code=1))
        nan = float("nan")
        for name, values in (("8", [complex(1, nan), 1]), ("9", [complex(1, nan), 3 + 4j])):
            torch.save({"n": torch.tensor(values)}, self.folder / f"{name}.pt")
        self.run_("tessera", "weights", "diff", "8.pt", "8.pt")
        self.assertIn("largest difference 4.47214, 1 elements", self.run_("tessera", "weights", "diff", "8.pt", "9.pt", code=1))
        other["b"] = numpy.array([numpy.nan, 1, 1], numpy.float32)
        write_safetensors(self.folder / "2.safetensors", other)
        self.assertIn("b  largest difference nan", self.run_("tessera", "weights", "diff", "1.safetensors", "2.safetensors", "--tolerance", "9", code=1))

    def test_wrong_words(self):
        write_safetensors(self.folder / "1.safetensors", {"a": numpy.zeros(4, numpy.float32)})
        for words, text in ((["inspect", "none"], "cannot be opened"), (["frobnicate"], "tessera weights --help"),
                            (["convert", "1.safetensors", "2.pt", "--dtype", "int3"], "expected float32"),
                            (["convert", "1.safetensors", "2.pt", "--max-shard-size", "1GB"], "is for folders"),
                            (["convert", "1.safetensors", "2/", "--max-shard-size", "lots"], "expected a size"),
                            (["convert", "1.safetensors", "2/", "--max-shard-size", "0x10"], "expected a size"),
                            (["convert", "1.safetensors", "2/", "--max-shard-size", "-5"], "expected a size"),
                            (["inspect", "1.safetensors", "--key", "x"], "which has no dicts"),
                            (["inspect", "1.safetensors", "--map", "x"], "expected PATTERN=REPLACEMENT"),
                            (["convert", "1.safetensors", "1.safetensors"], "another file")):
            self.assertIn(text, self.run_("tessera", "weights", *words, code=2))

    def test_a_name_cannot_forge_a_line(self):
        torch.save({"w\n00  F32  [9]  36 bytes  forged": torch.ones(1), "a\tb": torch.ones(1)}, self.folder / "x.pt")
        lines = self.run_("tessera", "weights", "inspect", "x.pt", "--no-digests").splitlines()
        self.assertEqual(len(lines), 3)
        self.assertTrue(lines[0].endswith(r"w\n00  F32  [9]  36 bytes  forged"), lines)

    def test_output_that_cannot_be_written_is_an_error(self):
        write_safetensors(self.folder / "1.safetensors", {"a": numpy.zeros(4, numpy.float32)})
        self.assertIn("writing failed", self.run_("bash", "-c", "tessera weights inspect 1.safetensors > /dev/full", code=1))

    def test_other_kinds_are_no_safetensors_files(self):
        (self.folder / "x").write_text("model:\n  type: GPT2\n")
        self.assertIn("is of an unknown kind", self.run_("tessera", "weights", "inspect", "x", code=2))


class Page(Folder):
    def blocks(self, language):
        return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)

    def test_the_snippets(self):
        before, after = self.blocks("python")
        (example,) = self.blocks("cpp")
        self.assertEqual(example, (SOURCE / "examples/python_checkpoint.cpp").read_text())
        self.run_(sys.executable, "-c", before)
        self.run_(BUILD / "bin/python_checkpoint")
        self.run_(sys.executable, "-c", after)
        (commands,) = self.blocks("sh")
        outputs = [self.run_("sh", "-c", line) for line in commands.splitlines()]
        self.assertEqual(len(outputs), 6)
        self.assertIn("F32  [2, 3]  24 bytes  weight", outputs[0])
        self.assertEqual(sorted(torch.load(self.folder / "half.pt")), ["linear.bias", "linear.weight"])

    def test_the_configs_are_read(self):
        for text in self.blocks("yaml"):
            (self.folder / "c.yaml").write_text(CONFIG)
            keys = [line.strip().split(":")[0] for line in text.splitlines() if re.match(r"  \w+:", line)]
            self.assertGreater(len(keys), 2)
            (self.folder / "page.yaml").write_text("base: c.yaml\n" + text)
            self.run_("tessera", "train", "-n", 1, "page.yaml", "--dump-config", "minimal")


if __name__ == "__main__":
    unittest.main()
