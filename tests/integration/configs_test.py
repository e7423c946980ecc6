#!/usr/bin/env python3
"""The configs of the main job give equal losses, and docs/config_reference.md is current.

    configs_test.py SOURCE_FOLDER BUILD_FOLDER
"""
import json, os, pathlib, re, subprocess, sys, tempfile, unittest

SOURCE, BUILD = pathlib.Path(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1))
TESSERA = str(BUILD / "bin/tessera")


def call(*words, cwd=None):
    env = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "WORLD_SIZE", "RANK")}
    env.update(OMP_NUM_THREADS="1")
    return subprocess.run([TESSERA, "train", *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


class Configs(unittest.TestCase):
    def test_all_configs_of_the_main_job_have_equal_losses(self):
        with tempfile.TemporaryDirectory() as folder:
            losses = {}
            for name in ("none", "ddp", "zero", "distributed_optimizer", "fsdp"):
                done = call("-n", 1 if name == "none" else 2, SOURCE / f"configs/{name}.yaml", "train.steps=30", "train.eval_batches=2", f"train.log={name}.jsonl",
                            cwd=folder)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                losses[name] = [json.loads(line)["loss"] for line in (pathlib.Path(folder) / f"{name}.jsonl").read_text().splitlines()]
                self.assertEqual(len(losses[name]), 30)
            for name, values in losses.items():
                for a, b in zip(values, losses["none"]):
                    self.assertLess(abs(a - b), 1e-4 * b, name)
            self.assertEqual(losses["ddp"], losses["zero"], "bit by bit")

    def test_what_travels_between_hosts_can_be_rounded(self):
        with tempfile.TemporaryDirectory() as folder:
            losses = []
            for words in ([], ["parallel.wire.gradients=int8", "parallel.wire.parameters=bfloat16"]):
                done = call("-n", 2, SOURCE / "configs/zero.yaml", "train.steps=5", "train.eval_batches=2", "train.log=log.jsonl", *words, cwd=folder)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                losses.append([json.loads(line)["loss"] for line in (pathlib.Path(folder) / "log.jsonl").read_text().splitlines()])
            self.assertEqual(losses[0], losses[1], "no effect on one host")
            for name, words, text in (
                    ("zero", ["parallel.wire.gradients=int4"], 'parallel.wire.gradients: int4; expected one of float32, bfloat16, int8'),
                    ("ddp", ["parallel.wire.parameters=int8"], "parallel.wire.parameters: no option here")):
                done = call("-n", 2, SOURCE / f"configs/{name}.yaml", "train.steps=5", *words, cwd=folder)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(text, done.stdout + done.stderr)

    def test_images_train_with_synchronised_normalisation(self):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, SOURCE / "scripts/make_synthetic_idx.py", "images", "--classes", "4"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            outcome = {}
            for ranks in (1, 2):
                words = ("train.epochs=2", "parallel.type=none") if ranks == 1 else ("train.epochs=2",)
                done = call("-n", ranks, SOURCE / "configs/images.yaml", *words, cwd=folder)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                lines = [json.loads(line) for line in (pathlib.Path(folder) / "images/log.jsonl").read_text().splitlines()]
                outcome[ranks] = [line["loss"] for line in lines]
                self.assertGreater(lines[-1]["eval_accuracy"], 0.9, lines[-1])
            for a, b in zip(outcome[1][:10], outcome[2][:10], strict=True):
                self.assertLess(abs(a - b), 1e-3 * max(a, 0.1), "two ranks are one process on the whole batch")
            done = call("-n", 2, SOURCE / "configs/images.yaml", "model.classes=3", cwd=folder)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("data.images: ", done.stderr)

    def test_the_reference_is_current(self):
        done = call("--config-reference")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, (SOURCE / "docs/config_reference.md").read_text(),
                         "docs/config_reference.md is made by: tessera train --config-reference > docs/config_reference.md")


class Reference(unittest.TestCase):
    """Every option of every component is in docs/config_reference.md."""

    PAGE = (SOURCE / "docs/config_reference.md").read_text()
    # Options of a class in a public header that configs do not have, and why.
    NOT_IN_CONFIGS = {
        "parameters_to_ignore": "the trainer trains every parameter that model.freeze does not name",
        "sync_module_states": "always: the trainer's ranks start equal",
        "broadcast_parameters": "always: the trainer's ranks start equal",
        "device": "model.device moves the whole model",
        "reduce_gradients": "always: the trainer has no other wrapper beside it",
        "embd_pdrop": "dropout sets all three", "attn_pdrop": "dropout sets all three", "resid_pdrop": "dropout sets all three",
        "activation_checkpointing_blocks": "patterns as activation_checkpointing",
        "enabled": "by the presence of loss_scale", "dynamic": "by a number as loss_scale",
        "mode": "the smaller loss is the better one", "check_finite": "train.on_nonfinite decides",
    }

    # Keys of Hugging Face's config.json alone.
    OF_CONFIG_JSON = {"model_type", "embd_pdrop", "attn_pdrop", "resid_pdrop"}

    def rows(self, section):
        """The keys of the tables under a heading, without their prefixes."""
        (text,) = re.findall(rf"(?ms)^##+ {re.escape(section)}\n(.*?)(?=^##|\Z)", self.PAGE)
        return {key for row in re.findall(r"(?m)^\| `([\w.]+)` \|", text) for key in (row, row.split(".")[0], row.split(".")[-1])}

    def test_every_key_that_is_read_is_there(self):
        words = set(re.findall(r"[\w]+", "\n".join(line for line in self.PAGE.splitlines() if line.startswith("|"))))
        found = 0
        for path in [*(SOURCE / "src").rglob("*.cpp"), *(SOURCE / "include").rglob("*.h")]:
            for key in re.findall(r'(?:read(?:_[a-z]+)?|take|map|map_or_type|list)\(\s*"([a-z]\w*)",', path.read_text()):
                found += 1
                if path.name == "gpt2_options.cpp" and key in self.OF_CONFIG_JSON: continue
                self.assertTrue(key in words, f"{path.relative_to(SOURCE)} reads {key}, of which docs/config_reference.md has no row and no explanation")
        self.assertGreater(found, 150)

    def test_every_option_of_the_public_classes_is_there(self):
        for header, struct, section in (
                ("distributed_data_parallel.h", "DistributedDataParallelOptions", "DistributedDataParallel"),
                ("fully_sharded_data_parallel.h", "FullyShardedDataParallelOptions", "FullyShardedDataParallel"),
                ("fully_sharded_data_parallel.h", "MixedPrecision", "FullyShardedDataParallel"),
                ("zero_redundancy_optimizer.h", "ZeroRedundancyOptimizerOptions", "ZeroRedundancyOptimizer"),
                ("distributed_optimizer.h", "DistributedOptimizerOptions", "DistributedOptimizer"),
                ("step/power_sgd.h", "PowerSgdOptions", "power_sgd"), ("step/grad_scaler.h", "GradScalerOptions", "train"),
                ("step/early_stop.h", "EarlyStopOptions", "train"), ("step/weight_average.h", "WeightAverageOptions", "train"),
                ("models/gpt2.h", "GPT2Options", "GPT2"), ("models/image_classifier.h", "ImageClassifierOptions", "ImageClassifier"),
                ("step/lr_scheduler.h", "WarmupCosineLrOptions", "warmup_cosine"), ("step/lr_scheduler.h", "LinearLrOptions", "linear")):
            (body,) = re.findall(rf"struct {struct} {{\n(.*?)\n}};", (SOURCE / "include/tessera" / header).read_text(), re.S)
            fields = re.findall(r"^  [\w:<>, ]+ (\w+) =\s", body, re.M)
            self.assertGreater(len(fields), 0, struct)
            missing = set(fields) - self.rows(section) - set(self.NOT_IN_CONFIGS) - ({"seed"} if section in ("GPT2", "ImageClassifier") else set())
            self.assertEqual(missing, set(), struct)


if __name__ == "__main__":
    unittest.main()
