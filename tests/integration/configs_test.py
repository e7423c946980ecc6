#!/usr/bin/env python3
"""The configs of the main job agree, and the reference page is current.

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
    def test_every_way_of_the_main_job_has_equal_losses(self):
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

    def test_the_reference_is_current(self):
        done = call("--config-reference")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, (SOURCE / "docs/config_reference.md").read_text(),
                         "docs/config_reference.md is made by: tessera train --config-reference > docs/config_reference.md")


if __name__ == "__main__":
    unittest.main()
