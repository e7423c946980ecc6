#!/usr/bin/env python3
"""Follows pages of docs/ as a reader does, from an empty folder: writes their files, runs their commands.

    pages_test.py SOURCE_FOLDER BUILD_FOLDER

A fenced block after a line that ends with "`NAME`:" is a file. Each line of a block `sh` is a command; one
that ends with "# fails" must fail. A block `cpp` is part of a program in examples/.
"""
import os, pathlib, re, subprocess, sys, tempfile, unittest

SOURCE, BUILD = (pathlib.Path(word).resolve() for word in (sys.argv.pop(1), sys.argv.pop(1)))
EXAMPLES = {path.name: path.read_text() for path in (SOURCE / "examples").glob("*.cpp")}
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "WORLD_SIZE", "RANK")}
ENVIRONMENT.update(PATH=f"{BUILD}/bin:{os.environ['PATH']}", OMP_NUM_THREADS="1", TESSERA=str(SOURCE))
LOSS = re.compile(r"loss (\d[\d.e+-]*)")


class Page(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def read(self, name):
        self.page = (SOURCE / "docs" / name).read_text()
        for text in self.blocks("cpp"):
            self.assertTrue(any(text in program for program in EXAMPLES.values()), f"{name}: not in examples/:\n{text}")
        for file, text in re.findall(r"`([\w./-]+)`[^`\n]*:\n\n```\w+\n(.*?)```", self.page, re.S):
            (self.folder / file).write_text(text)

    def blocks(self, language):
        return re.findall(rf"```{language}\n(.*?)```", self.page, re.S)

    def whole(self, program):
        """The page has the whole program."""
        self.assertIn(f"```cpp\n{EXAMPLES[program]}```", self.page)

    def sh(self, command, fails=False):
        done = subprocess.run(["bash", "-c", command], cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode != 0, fails, f"{command}\n{done.stdout}\n{done.stderr}")
        return done.stdout + done.stderr

    def follow(self, name):
        """The outputs of the page's commands, in order."""
        self.read(name)
        commands = [line for block in self.blocks("sh") for line in block.splitlines()]
        return [self.sh(command, command.endswith("# fails")) for command in commands]


class Migrating(Page):
    def test_both_programs_give_the_same_weights(self):
        before, after, differences = self.follow("migrating.md")
        self.whole("all_reduce_before.cpp")
        self.whole("all_reduce_after.cpp")
        self.assertEqual(len(LOSS.findall(before)), 5)
        self.assertEqual(LOSS.findall(before), LOSS.findall(after))
        self.assertIn("0 of 4 tensors differ", differences)
        self.assertIn("`0 of 4 tensors differ`", self.page)


class OwnLoop(Page):
    def test_a_stopped_run_goes_on(self):
        straight, _, first, second, differences, third = self.follow("own_loop.md")
        self.whole("own_loop.cpp")
        self.assertIn("going on from own_loop_run/step-00000090", second)
        self.assertEqual(LOSS.findall(straight), LOSS.findall(first + second))
        self.assertIn("0 of 4 tensors differ", differences)
        self.assertIn("going on from own_loop_run/step-00000150", third)

    def test_a_signal_to_one_rank_stops_all_after_one_step(self):
        signal = "until [ -d own_loop_run/step-00000020 ]; do sleep 0.05; done; kill -USR1 $$"
        text = self.sh(f"tessera run -n 2 bash -c 'if [ $RANK = 1 ]; then ({signal}) & fi; exec own_loop 1000000'", fails=True)
        self.assertNotIn("BrokenWorldError", text)
        (newest,) = self.sh("ls own_loop_run | tail -n 1").split()
        self.assertIn(f"going on from own_loop_run/{newest}", self.sh(f"tessera run -n 2 own_loop {int(newest[5:]) + 1}"))


class Options(Page):
    def fields(self, header, struct):
        """The options of a struct in a public header."""
        (body,) = re.findall(rf"struct {struct} {{\n(.*?)\n}};", (SOURCE / "include/tessera" / header).read_text(), re.S)
        return re.findall(r"^  [\w:<>, ]+ (\w+) = ", body, re.M)

    def rows(self):
        return re.findall(r"(?m)^\| `(\w+)` \|", self.page)

    def test_ddp(self):
        _, _, differences = self.follow("ddp.md")
        self.whole("ddp_loop.cpp")
        self.assertIn("0 of 4 tensors differ", differences)
        fields = self.fields("distributed_data_parallel.h", "DistributedDataParallelOptions")
        self.assertEqual(len(fields), 10)
        self.assertEqual([row for row in self.rows() if row in fields], fields, "the table has every option, in the header's order")

    def test_sync_batch_norm(self):
        one, _, differences = self.follow("sync_batch_norm.md")
        self.whole("sync_batch_norm.cpp")
        self.assertIn("converted features.1", one)
        self.assertIn("0 of 13 tensors differ", differences)


class Images(Page):
    def test_the_plain_network_reads_the_weights(self):
        _, text, names = self.follow("images.md")
        self.whole("image_fsdp.cpp")
        sharded, loaded = re.search(r"accuracy ([\d.]+), of the loaded weights ([\d.]+)", text).groups()
        self.assertEqual(sharded, loaded)
        self.assertGreater(float(sharded), 0.9)
        self.assertIn("second.layers.1.running_mean", names)


if __name__ == "__main__":
    unittest.main()
