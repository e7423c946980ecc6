#!/usr/bin/env python3
"""The configs of the main job give equal losses, and docs/config_reference.md is current.

    configs_test.py SOURCE_FOLDER BUILD_FOLDER
"""
import json, os, pathlib, subprocess, sys, tempfile, unittest

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
                    ("ddp", ["parallel.wire.parameters=int8"], "parallel.wire.parameters: no option here"),
                    ("zero", ["parallel.wire.gradients=int8", "parallel.overlap_with_backward=true", "train.clip_grad_norm=null"],
                     "option wire.gradients is int8, and it excludes overlap_with_backward")):
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


if __name__ == "__main__":
    unittest.main()
