#!/usr/bin/env python3
"""GPT-2 of Hugging Face's transformers in and out of folders with three shards. Skipped where transformers is
not installed; any Python that has it may run the test, whatever PyTorch the build uses.

    transformers_test.py BUILD_FOLDER
"""
import json, os, pathlib, subprocess, sys, tempfile, unittest

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
try:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError as error:
    print(f"skipped: {error}; pip install transformers, and run this test with that Python")
    sys.exit(77)

ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK")}
ENVIRONMENT.update(PATH=f"{BUILD}/bin:{os.environ['PATH']}", OMP_NUM_THREADS="1")
CONFIG = """
model: {type: GPT2, config: in/config.json, dropout: 0, init: in}
data: {type: ByteText, path: /usr/share/common-licenses/GPL-3, seq_len: 16}
optimizer: {type: AdamW, lr: 1e-3}
parallel: {type: FullyShardedDataParallel}
train: {steps: 0, global_batch: 6, eval_batches: 1, save: out/, max_shard_mb: 1}
"""


class Transformers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "c.yaml").write_text(CONFIG)
        torch.manual_seed(1)
        self.model = GPT2LMHeadModel(GPT2Config(
            vocab_size=256, n_positions=32, n_embd=128, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) / 50)  # biases are 0 otherwise
        self.model.save_pretrained(self.folder / "in", max_shard_size="1MB")
        self.assertEqual(len(list((self.folder / "in").glob("*.safetensors"))), 3)

    def run_(self, *words):
        done = subprocess.run([str(w) for w in words], cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
        self.assertEqual(done.returncode, 0, f"{words}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def train(self, ranks, *words):
        return self.run_("tessera", "train", "-n", ranks, "c.yaml", *words)

    def check(self, folder, shards):
        """transformers reads the folder as the model that was saved, and computes the same."""
        self.assertEqual(len(list((self.folder / folder).glob("*.safetensors"))), shards)
        back = GPT2LMHeadModel.from_pretrained(self.folder / folder).eval()
        one, two = self.model.state_dict(), back.state_dict()
        self.assertEqual(list(one), list(two))
        self.assertTrue(all(torch.equal(one[name], two[name]) for name in one))
        tokens = torch.arange(10)[None]
        self.assertTrue(torch.equal(self.model(tokens).logits, back(tokens).logits))

    def test_a_folder_goes_through_the_trainer(self):
        for ranks, shards in ((3, 3), (2, 4), (1, 3)):
            self.train(ranks, f"train.save=out{ranks}/", *(["parallel.type=none"] if ranks == 1 else []))
            self.check(f"out{ranks}", shards)

    def test_a_folder_goes_through_convert(self):
        self.run_("tessera", "weights", "convert", "in", "out/", "--max-shard-size", "1MB")
        self.check("out", 3)
        self.run_("tessera", "weights", "convert", "out", "whole.pt")
        self.run_("tessera", "weights", "convert", "whole.pt", "back.safetensors")
        self.assertIn("0 of 40 tensors differ", self.run_("tessera", "weights", "diff", "in", "back.safetensors"))

    def test_a_state_dict_of_torch_save_with_the_tied_head(self):
        torch.save({"model": self.model.state_dict()}, self.folder / "w.pt")
        self.assertIn("lm_head.weight", torch.load(self.folder / "w.pt")["model"])
        self.train(3, "model.init=w.pt")
        self.run_("cp", "in/config.json", "out/config.json")
        self.check("out", 3)

    def test_a_step_starts_from_the_same_loss(self):
        """The loss of the first step is that of transformers on the same tokens."""
        text = pathlib.Path("/usr/share/common-licenses/GPL-3").read_bytes()
        tokens = torch.tensor(list(text[:6 * 16 + 1]))
        logits = self.model(tokens[:-1].view(6, 16)).logits
        expected = torch.nn.functional.cross_entropy(logits.view(-1, 256), tokens[1:]).item()
        out = self.train(2, "train.steps=1", "data.order=sequential", "train.log=log.jsonl", "train.save=null")
        first = json.loads((self.folder / "log.jsonl").read_text().splitlines()[0])
        self.assertAlmostEqual(first["loss"], expected, 4, out)


if __name__ == "__main__":
    unittest.main()
