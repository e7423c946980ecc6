#!/usr/bin/env python3
"""`tessera report` and the hooks TensorBoard and CSV, on a run that is stopped on 3 ranks and goes on on 2.

Event files are read by this test's own reader, and by PyPI's tensorboard where a Python has it: the one that runs this test,
or the one that TENSORBOARD_PYTHON names."""
import csv, html.parser, json, math, os, pathlib, re, resource, struct, subprocess, sys, tempfile, unittest

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
TESSERA = BUILD / "bin/tessera"
CONFIG = """
model: {type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2, seed: 1}
data: {type: ByteText, path: text.txt, seq_len: 16, order: sequential, val_fraction: 0.2}
optimizer: {type: AdamW, lr: 3e-3}
train: {steps: 8, global_batch: 12, log: log.jsonl, eval_every: 4}
checkpoint: {folder: "<b>&k'", every: 4}
hooks: [{type: TensorBoard, folder: tb, histograms_every: 4}, {type: CSV, path: log.csv}]
"""


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frames(path):
    data, at = path.read_bytes(), 0
    while at < len(data):
        (length, check) = struct.unpack_from("<QI", data, at)
        assert check == masked(data[at:at + 8]), path
        message = data[at + 12:at + 12 + length]
        assert struct.unpack_from("<I", data, at + 12 + length)[0] == masked(message), path
        yield message
        at += length + 16


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


class Report(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name)
        (cls.folder / "text.txt").write_text("".join(f"line {i} of a text\n" for i in range(600)))
        (cls.folder / "c.yaml").write_text(CONFIG)
        cls.call("train", "-n", 3, "c.yaml", "parallel.type=ZeroRedundancyOptimizer", "train.steps=4")
        cls.call("train", "-n", 2, "c.yaml", "parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}}")

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    @classmethod
    def call(cls, *words, code=0):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([TESSERA, *map(str, words)], cwd=cls.folder, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done

    def log(self):
        return [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]

    def events(self):
        return [json.loads(line) for line in (self.folder / "log.events.jsonl").read_text().splitlines()]

    def page(self, *runs):
        self.call("report", *runs, "-o", "r.html")
        return Page((self.folder / "r.html").read_text())

    def test_the_events_have_the_history(self):
        kinds = [(event["event"], event["step"]) for event in self.events()]
        self.assertEqual(kinds, [("start", 0), ("memory", 1), ("checkpoint", 4), ("memory", 4), ("end", 4),
                                 ("start", 4), ("memory", 5), ("checkpoint", 8), ("memory", 8), ("end", 8)])
        first, second = (event for event in self.events() if event["event"] == "start")
        self.assertEqual((first["ranks"], first["resumed_from"]), (3, None))
        self.assertEqual((second["ranks"], second["parallel"]), (2, "FullyShardedDataParallel"))
        self.assertEqual(second["config"]["optimizer.lr"], "0.003")
        self.assertEqual(first["parameter_bytes"], 4 * first["parameters"])

    def test_memory_and_communication_are_those_of_the_formulas(self):
        events = self.events()
        early, last = [event for event in events if event["event"] == "memory"][2:]
        self.assertEqual(early["ranks"], [last["ranks"][0]] * 2)
        self.assertEqual(last["ranks"][0], last["formula"])
        zero = events[4]["communication"]
        bytes_of_parameters = events[0]["parameter_bytes"]
        # 2(W-1)/W of the parameters a step, half of it each way, up to the padding of uneven shards.
        self.assertAlmostEqual(zero["reduce_scatter"]["received"] / (4 * bytes_of_parameters), 2 / 3, delta=0.01)
        self.assertGreaterEqual(zero["all_gather"]["received"] / (4 * bytes_of_parameters), 2 / 3 - 0.01)

    def test_a_start_without_steps_does_not_hide_the_communication(self):
        events = self.events()
        again = [{**events[5], "step": 8}, {**events[-1], "communication": {}}]
        for end, lines in (("jsonl", self.log()), ("events.jsonl", events + again)):
            (self.folder / f"again.{end}").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.assertEqual(*(page.text.split("Communication")[1].split("Config")[0].replace(name, "")
                           for name in ("log.jsonl", "again.jsonl") for page in [self.page(name)]))

    def test_a_csv_file_is_that_of_one_hook(self):
        (self.folder / "data.csv").write_text("x,y\n1,2\n")
        for hooks, words in (("[{type: CSV, path: data.csv}]", "data.csv: its first column is not step"),
                             ("[{type: CSV, path: two.csv}, {type: CSV, path: two.csv}]", "two.csv: two CSV hooks write it")):
            text = self.call("train", "-n", 1, "c.yaml", "train.log=null", "checkpoint=null", f"hooks={hooks}", code=2).stderr
            self.assertIn(words, text)
        self.assertEqual((self.folder / "data.csv").read_text(), "x,y\n1,2\n")

    def test_a_pipe_is_no_log(self):
        os.mkfifo(self.folder / "pipe.jsonl")
        self.assertIn("pipe.jsonl", self.call("report", "pipe.jsonl", "-o", "p.html", code=2).stderr)

    def test_the_page_loads_nothing_and_shows_every_part(self):
        page = self.page("log.jsonl")
        for tag, attributes in page.tags:
            self.assertNotIn(tag, ("script", "link", "img", "iframe", "object", "embed"))
            self.assertFalse({"src", "href", "srcset", "xlink:href", "onload"} & set(attributes), (tag, attributes))
        raw = (self.folder / "r.html").read_text()
        self.assertNotRegex(raw, r"https?://|url\(|@import")
        self.assertIn("prefers-color-scheme: dark", raw)
        for text in ("Loss", "Norm of the gradient", "Learning rate", "Tokens per second", "Time of a step", "Steps done over time",
                     "Memory", "formula", "Communication", "2(W−1)/W", "Config", "3 → 2", "ZeroRedundancyOptimizer → Fully"):
            self.assertIn(text, page.text)
        self.assertIn("<b>&k'/step-00000004", page.text)  # a name with HTML's characters is text

    def test_the_curve_of_the_loss_is_that_of_the_log(self):
        raw = (self.page("log.jsonl"), (self.folder / "r.html").read_text())[1]
        loss = re.search(r"<figcaption>Loss</figcaption>.*?class='line c0' d='([^']*)'", raw, re.S).group(1)
        points = [tuple(map(float, pair.split())) for pair in re.split("[ML]", loss)[1:]]
        losses = [line["loss"] for line in self.log()]
        everything = losses + [line["eval_loss"] for line in self.log() if "eval_loss" in line]
        low, high = min(everything), max(everything)
        self.assertEqual(len(points), 8)
        for (x, y), (step, value) in zip(points, enumerate(losses)):
            self.assertAlmostEqual((x - points[0][0]) / (points[-1][0] - points[0][0]), step / 7, delta=0.01)
            self.assertAlmostEqual((196 - y) / 186, (value - low) / (high - low), delta=0.01)

    def test_several_runs_are_side_by_side(self):
        (self.folder / "old").mkdir(exist_ok=True)
        lines = [{"step": step, "loss": 5 - step, "lr": 1} for step in range(4)] + [{"step": 4, "loss": None, "lr": 1}]
        (self.folder / "old/log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{\"step\": 5, \"lo")
        page = self.page("log.jsonl", "old")
        self.assertIn("old/log.jsonl", page.text)
        self.assertIn("1 lines could not be read", page.text)
        self.assertTrue(any("line c1" in attributes.get("class", "") for _, attributes in page.tags))

    def test_a_long_log_makes_a_small_page(self):
        with open(self.folder / "long.log", "w") as file:
            for step in range(200_000):
                file.write(f'{{"step": {step}, "loss": {100 if step == 77_777 else 2}, "ms": 1}}\n')
        page = self.page("long.log")
        self.assertLess((self.folder / "r.html").stat().st_size, 100_000)
        path = next(attributes["d"] for tag, attributes in page.tags if tag == "path")
        self.assertIn(" 10.0", path)  # the one high loss is still there, at the upper edge

    def test_values_that_have_no_number_between_them_have_axes(self):
        for low, high in ((1e17, math.nextafter(1e17, 2e17)), (-5e-324, 5e-324), (-1.7e308, 1.7e308), (1.0, math.nextafter(1.0, 2.0))):
            log = self.folder / "near.jsonl"
            log.write_text("".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in ((low, low), (high, high))))
            done = subprocess.run([TESSERA, "report", log, "-o", self.folder / "near.html"], capture_output=True, text=True, timeout=20,
                                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)))
            self.assertEqual(done.returncode, 0, done.stderr)
            page = Page((self.folder / "near.html").read_text())
            self.assertLess(sum(tag == "text" for tag, _ in page.tags), 60)

    def test_mistakes_are_named(self):
        for words, text in ((("nothing.jsonl",), "nothing.jsonl: No such file"), (("tb",), "tb: the folder has no log"),
                            (("text.txt",), "text.txt: it has no record of a run"), ((), "RUN is required"),
                            (("log.jsonl", "-o", "no/r.html"), "no/r.html: No such file")):
            self.assertIn(text, self.call("report", *words, code=2).stderr)

    def test_the_table_is_the_log(self):
        with open(self.folder / "log.csv") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([(int(row["step"]), float(row["loss"])) for row in rows],
                         [(line["step"], line["loss"]) for line in self.log()])

    def test_event_files_are_sound(self):
        files = sorted((self.folder / "tb").glob("events.out.tfevents.*"))
        self.assertEqual(len(files), 2)
        for path in files:
            messages = list(frames(path))
            self.assertIn(b"brain.Event:2", messages[0])
            self.assertTrue(any(b"train/loss" in message for message in messages))
            self.assertTrue(any(b"parameters/transformer.wte.weight" in message for message in messages))

    def test_tensorboard_reads_them(self):
        pythons = [os.environ["TENSORBOARD_PYTHON"]] if "TENSORBOARD_PYTHON" in os.environ else [sys.executable]
        code = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
board = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "histograms": 0})
board.Reload()
print(json.dumps({"loss": [[e.step, e.value] for e in board.Scalars("train/loss")], "eval": [[e.step, e.value] for e in board.Scalars("eval/loss")],
                  "histogram": [[e.step, e.histogram_value.num] for e in board.Histograms("parameters/transformer.wte.weight")]}))
"""
        if subprocess.run([pythons[0], "-c", "import tensorboard"], capture_output=True).returncode != 0:
            self.skipTest("no tensorboard in this Python; set TENSORBOARD_PYTHON to one that has it (pip install tensorboard)")
        done = subprocess.run([pythons[0], "-c", code, "tb"], cwd=self.folder, capture_output=True, text=True, timeout=100)
        self.assertEqual(done.returncode, 0, done.stderr)
        board = json.loads(done.stdout.splitlines()[-1])
        single = lambda value: struct.unpack("f", struct.pack("f", value))[0]
        self.assertEqual(board["loss"], [[line["step"], single(line["loss"])] for line in self.log()])
        self.assertEqual(board["eval"], [[line["step"], single(line["eval_loss"])] for line in self.log() if "eval_loss" in line])
        self.assertEqual(board["histogram"], [[3, 4096], [7, 4096]])


if __name__ == "__main__":
    unittest.main()
