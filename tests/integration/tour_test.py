#!/usr/bin/env python3
"""Follows docs/tour.md: writes its files and runs its commands against an installed prefix.

    tour_test.py SOURCE_FOLDER BUILD_FOLDER
"""
import os, pathlib, re, subprocess, sys, tempfile, unittest

SOURCE, BUILD = pathlib.Path(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1))
TOUR = (SOURCE / "docs/tour.md").read_text()


class Tour(unittest.TestCase):
    def test_every_command(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            prefix = folder / "prefix"
            subprocess.run(["cmake", "--install", BUILD, "--prefix", prefix], check=True, stdout=subprocess.DEVNULL)
            for language, file in (("cpp", "own_model.cpp"), ("cmake", "CMakeLists.txt"), ("yaml", "own_model.yaml")):
                (text,) = re.findall(rf"```{language}\n(.*?)```", TOUR, re.S)
                (folder / file).write_text(text)
            env = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "WORLD_SIZE", "RANK")}
            env.update(PREFIX=str(prefix), OMP_NUM_THREADS="1", CMAKE_GENERATOR="Ninja")
            outputs = {}
            commands = [line for block in re.findall(r"```sh\n(.*?)```", TOUR, re.S) for line in block.splitlines()]
            self.assertGreaterEqual(len(commands), 11)
            for command in commands:
                done = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL)
                expected = 2 if command.endswith("# fails") else 0
                self.assertEqual(done.returncode, expected, f"{command}\n{done.stdout}\n{done.stderr}")
                outputs[command] = done.stdout + done.stderr
            self.assertIn('did you mean "steps"?', outputs["build/own_model own_model.yaml train.stpes=3   # fails"])
            going_on = [text for text in outputs.values() if "resuming from run/step-" in text]
            self.assertEqual([re.search(r"resuming from run/step-0*(\d+)", text)[1] for text in going_on], ["100", "300", "400"])
            for file in ("model.safetensors.index.json", "state.json", "config.yaml", "manifest.json"):
                self.assertIn(file, outputs["ls run/step-00000500"])
            losses = re.findall(r"loss (\d+\.\d+)", outputs["build/own_model -n 2 own_model.yaml"])
            self.assertLess(float(losses[-1]), 0.5 * float(losses[0]), "it learns")

    def test_the_example_is_the_one_of_the_tour(self):
        self.assertIn((SOURCE / "examples/own_model.cpp").read_text(), TOUR)
        self.assertIn((SOURCE / "examples/own_model.yaml").read_text(), TOUR)


if __name__ == "__main__":
    unittest.main()
