#!/usr/bin/env python3
"""Follows pages of docs/ as a reader does, from an empty folder: writes their files, runs their commands.

    pages_test.py SOURCE_FOLDER BUILD_FOLDER

A fenced block after a line that ends with "`NAME`:" is a file. Each line of a block `sh` is a command; one
that ends with "# fails" must fail. A block `cpp` is part of a program in examples/.
"""
import array, json, os, pathlib, random, re, signal, struct, subprocess, sys, tempfile, time, unittest

SOURCE, BUILD = (pathlib.Path(word).resolve() for word in (sys.argv.pop(1), sys.argv.pop(1)))
EXAMPLES = {path.name: path.read_text() for path in (SOURCE / "examples").glob("*.cpp")}
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "WORLD_SIZE", "RANK")}
ENVIRONMENT.update(PATH=f"{BUILD}/bin:{os.environ['PATH']}", OMP_NUM_THREADS="1", TESSERA=str(SOURCE))
ENVIRONMENT.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_rmaps_base_oversubscribe="1",
                   PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe")  # Open MPI 5
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
        for file, text in re.findall(r"`([\w./-]+\.\w+)`:\n\n```\w+\n(.*?)```", self.page, re.S):
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


class Mpi(Page):
    def test_both_programs_give_the_same_weights(self):
        if not (BUILD / "bin/mpi_after").exists():
            self.skipTest("no mpicxx when the build was configured; scripts/install_dependencies.sh installs libopenmpi-dev")
        before, after, differences = self.follow("mpi.md")
        self.whole("mpi_before.cpp")
        self.whole("mpi_after.cpp")
        self.assertEqual(len(LOSS.findall(before)), 5)
        self.assertEqual(LOSS.findall(before), LOSS.findall(after))
        self.assertIn("0 of 4 tensors differ", differences)


class OwnLoop(Page):
    def test_a_stopped_run_goes_on(self):
        straight, _, first, second, differences, third = self.follow("own_loop.md")
        self.whole("own_loop.cpp")
        self.assertIn("going on from step 90", second)
        self.assertEqual(LOSS.findall(straight), LOSS.findall(first + second))
        self.assertIn("0 of 4 tensors differ", differences)
        self.assertIn("going on from step 150", third)

    def test_a_signal_to_one_rank_stops_all_after_one_step(self):
        signal = "until ls -d own_loop_run/step-* >/dev/null 2>&1; do sleep 0.05; done; kill -USR1 $$"
        text = self.sh(f"tessera run -n 2 bash -c 'if [ $RANK = 1 ]; then ({signal}) & fi; exec own_loop 1000000'", fails=True)
        self.assertNotIn("BrokenWorldError", text)
        (newest,) = self.sh("ls own_loop_run | tail -n 1").split()
        self.assertIn(f"going on from step {int(newest[5:])}", self.sh(f"tessera run -n 2 own_loop {int(newest[5:]) + 1}"))


class Gpu(Page):
    def test_the_program_gives_the_same_weights_on_a_device(self):
        """On the simulated device, whose name is sim."""
        self.read("gpu.md")
        self.whole("gpu_loop.cpp")
        there, here, differences = (line.replace("gpu_loop cuda", f"{BUILD}/bin/gpu_loop_sim sim") for line in self.blocks("sh")[0].splitlines())
        losses = {}
        for command in (there, here, there.replace("-n 2", "-n 3"), there.replace("-n 2", "-n 1"), here):
            losses[command] = [float(loss) for loss in LOSS.findall(self.sh(command))]
            self.assertEqual(len(losses[command]), 5)
        for one, other in zip(losses[there], losses[here]):
            self.assertAlmostEqual(one, other, delta=1e-3 * other)
        self.sh(there)
        self.assertRegex(self.sh(differences), r"0 of 4 tensors differ")
        self.assertIn("expected: gpu_loop DEVICE", self.sh("tessera run -n 2 gpu_loop cuda", fails=True))
        self.assertIn("sees no CUDA device", self.sh("gpu_loop cuda x.safetensors", fails=True))

    def test_its_errors_are_those_of_the_sources(self):
        self.read("gpu.md")
        table = self.page.split("## Errors and what they mean")[1].split("\n## ")[0]
        sources = ""
        for folder in ("src", "cmake"):
            for path in (SOURCE / folder).rglob("*.c*"):
                sources += re.sub(r'"\n\s*"', "", path.read_text())
        messages = re.findall(r"(?m)^\| `(.*?)`", table)
        self.assertGreater(len(messages), 7)
        for message in set(messages) - {"message", "CUDA out of memory"}:
            for part in re.split(r"…|\b(?:false|true|cuda|CUDA|\d+)\b|\(it has", message):
                self.assertIn(part.strip(), sources, message)
        variables = set(re.findall(r"`(TORCH_NCCL_\w+)`", self.page))
        self.assertEqual(variables, set(re.findall(r'"(TORCH_NCCL_\w+)"', sources)))


class Session(Page):
    def test_a_solver_trains_on_any_number_of_ranks(self):
        begun, resumed, _, alone = self.follow("session.md")
        self.whole("solver.cpp")
        self.assertEqual(len(LOSS.findall(alone)), 3)
        self.assertEqual([f"{float(loss):.4e}" for loss in LOSS.findall(alone)], [f"{float(loss):.4e}" for loss in LOSS.findall(begun + resumed)])
        self.assertIn("evaluation", alone)
        self.assertTrue((self.folder / "solver.safetensors").exists())


class Models(Page):
    def test_two_models_train_and_go_on_with_another_number_of_ranks(self):
        first, second, weights = self.follow("models.md")
        self.assertIn("parallel: generator: ZeroRedundancyOptimizer, discriminator: ZeroRedundancyOptimizer, 2 ranks", first)
        self.assertIn("resuming from gan_run/step-", second)
        lines = [json.loads(line) for line in (self.folder / "gan.jsonl").read_text().splitlines()]
        self.assertEqual([line["step"] for line in lines], list(range(200)))
        self.assertEqual(lines[-1]["lr"], lines[-1]["generator.lr"])
        self.assertEqual(lines[-1]["discriminator.lr"], 1e-3)
        self.assertIn("layers.2.weight", weights)
        self.assertTrue((self.folder / "gan-discriminator.safetensors").exists())


class OtherLanguages(Page):
    def test_a_program_in_c(self):
        ENVIRONMENT["TESSERA_LIB"] = str(BUILD / "lib")
        _, text = self.follow("c.md")
        self.assertLess(float(re.search(r"loss ([\d.e+-]+)", text).group(1)), 0.05)
        for block in self.blocks("fortran"):
            self.assertIn(block, (SOURCE / "examples/fortran/advection.f90").read_text())

    def read(self, name):
        """Blocks of C are files of the page."""
        self.page = (SOURCE / "docs" / name).read_text()
        for file, text in re.findall(r"`([\w./-]+\.\w+)`:\n\n```\w+\n(.*?)```", self.page, re.S):
            (self.folder / file).write_text(text)


class Train(Page):
    def test_the_metric_is_the_one_of_the_example(self):
        self.read("train.md")
        self.assertEqual(len(self.blocks("cpp")), 1)


class Errors(Page):
    def test_an_example_ends_with_a_status_and_not_by_a_signal(self):
        programs = sorted(EXAMPLES.keys() - {"own_model.cpp", "gan.cpp", "mpi_before.cpp"})  # train_main catches there; nothing of ours
        self.assertGreater(len(programs), 7)
        for program in programs:
            with self.subTest(program):
                self.assertIn("} catch (const std::exception& error) {", EXAMPLES[program])
        text = self.sh("tessera run -n 2 ddp_loop absent/ddp.pt", fails=True)
        self.assertIn("Parent directory absent does not exist", text)
        self.assertRegex(text, r"rank 0 \(pid \d+\) exited with code 1")
        self.assertNotIn("SIGABRT", text)


class Options(Page):
    def fields(self, header, struct):
        """The options of a struct in a public header."""
        (body,) = re.findall(rf"struct {struct} {{\n(.*?)\n}};", (SOURCE / "include/tessera" / header).read_text(), re.S)
        return re.findall(r"^  [\w:<>, ]+ (\w+) = ", body, re.M)

    def rows(self):
        return re.findall(r"(?m)^\| `(\w+)` \|", self.page)

    def test_ddp(self):
        for differences in self.follow("ddp.md")[2::3]:
            self.assertIn("0 of 4 tensors differ", differences)
        self.whole("ddp_loop.cpp")
        fields = self.fields("distributed_data_parallel.h", "DistributedDataParallelOptions")
        self.assertEqual(len(fields), 10)
        self.assertEqual([row for row in self.rows() if row in fields], fields, "the table has every option, in the header's order")

    def test_zero(self):
        self.read("zero.md")
        fields = self.fields("zero_redundancy_optimizer.h", "ZeroRedundancyOptimizerOptions")
        self.assertEqual(len(fields), 10)
        options, refused = self.page.split("## Options that do not go together")
        self.assertEqual(re.findall(r"(?m)^\| `(\w+)` \|", options)[:10], fields, "the table has every option, in the header's order")
        rows = re.findall(r"(?m)^\| (`.*`) \| (.*) \| .* \|$", refused.split("\n## ")[0])
        self.assertLessEqual(len(rows), 12)
        tested = (SOURCE / "tests/zero/zero_plan_test.cpp").read_text().split("kRefused{")[1].split("};")[0]
        words = {"own storage": "`parameters_as_bucket_view`", "reduced elsewhere": "`reduce_gradients`", "DDP": "DistributedDataParallel", "device": "CPU"}
        for option, other in re.findall(r'{{"([\w.]+)", "([\w. ]+)"}', tested):
            found = [row for row in rows if f"`{option}`" in row[0] and words.get(other, other) in row[1]]
            self.assertTrue(found or (option, other) == ("wire.gradients", "DDP"), f"no row for {option} and {other}")

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
        for ranks in (1, 3):
            (accuracy,) = re.findall(r"accuracy ([\d.]+)", self.sh(f"tessera run -n {ranks} image_fsdp images"))
            self.assertGreater(float(accuracy), 0.9)
        self.assertIn("second.layers.1.running_mean", names)


class FineTuning(Page):
    def write_gpt2(self):
        """A small GPT-2 with the files and names of Hugging Face."""
        block = {"ln_1.weight": [16], "ln_1.bias": [16], "attn.c_attn.weight": [16, 48], "attn.c_attn.bias": [48],
                 "attn.c_proj.weight": [16, 16], "attn.c_proj.bias": [16], "ln_2.weight": [16], "ln_2.bias": [16],
                 "mlp.c_fc.weight": [16, 64], "mlp.c_fc.bias": [64], "mlp.c_proj.weight": [64, 16], "mlp.c_proj.bias": [16]}
        shapes = {"wte.weight": [256, 16], "wpe.weight": [64, 16], "ln_f.weight": [16], "ln_f.bias": [16],
                  **{f"h.{i}.{name}": shape for i in range(2) for name, shape in block.items()}}
        draw, header, data = random.Random(5), {}, b""
        for name, shape in shapes.items():
            count = shape[0] * (shape[1] if len(shape) > 1 else 1)
            values = array.array("f", [draw.gauss("ln_" in name and "weight" in name, 0.02) for _ in range(count)]).tobytes()
            header[f"transformer.{name}"] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
            data += values
        text = json.dumps(header).encode()
        folder = self.folder / "gpt2"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}))
        (folder / "tokenizer.json").write_text("{}")

    def interrupt(self, command):
        """Ctrl-C after the first checkpoint."""
        run = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=self.folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        end = time.monotonic() + 60
        while not (self.folder / "run").exists() or not any(self.folder.glob("run/step-*")):
            self.assertLess(time.monotonic(), end, "no checkpoint within a minute")
            self.assertIsNone(run.poll())
            time.sleep(0.02)
        run.send_signal(signal.SIGINT)
        text, _ = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 128 + signal.SIGINT, text)
        return int(re.search(r"interrupted at step (\d+)", text)[1])

    def test_two_ranks_then_three(self):
        self.read("finetune_gpt2.md")
        self.write_gpt2()
        # Stands for the package of that name: a tokenizer whose tokens are bytes.
        (self.folder / "transformers.py").write_text(
            "class AutoTokenizer:\n    def from_pretrained(name): return AutoTokenizer()\n    def encode(self, text): return list(text.encode())\n")
        text = pathlib.Path("/usr/share/common-licenses/GPL-3").read_text()
        (self.folder / "train.txt").write_text(text[:30000])
        (self.folder / "val.txt").write_text(text[30000:33000])
        encode, two, three, differences = self.blocks("sh")[0].splitlines()
        self.sh(encode)
        self.assertTrue(two.endswith("# stop it with Ctrl-C"))
        step = self.interrupt(two)
        text = self.sh(three)
        self.assertRegex(text, rf"resuming from run/step-0*{step}\b")
        self.assertIn("3 ranks", text)
        losses = [json.loads(line)["loss"] for line in (self.folder / "log.jsonl").read_text().splitlines()]
        self.assertEqual(len(losses), 300)
        self.assertLess(losses[-1], losses[0] - 0.05)
        self.assertIn("of 28 tensors differ", self.sh(differences))
        for file in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
            self.assertTrue((self.folder / "tuned" / file).exists(), file)
        self.assertEqual(len(list(self.folder.glob("tuned/model-*-of-00003.safetensors"))), 3)
        self.sh("tessera weights convert tuned one.safetensors && tessera report log.jsonl")


class Slurm(Page):
    # Two tasks of a step, with Slurm's variables. srun ends with the highest code of its tasks.
    SRUN = """#!/bin/bash
        while [[ $1 == --* ]]; do shift; done
        export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_NNODES=1 SLURM_STEP_NODELIST=localhost
        for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & echo $! >> tasks; done
        worst=0
        for pid in $(cat tasks); do wait $pid; code=$?; [ $code -gt $worst ] && worst=$code; done
        rm tasks
        exit $worst
        """
    CONFIG = """
        model: {type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 1, n_head: 2}
        data: {type: ByteText, path: /usr/share/common-licenses/GPL-3, seq_len: 16}
        optimizer: {type: AdamW, lr: 1e-3}
        parallel: {type: ZeroRedundancyOptimizer}
        train: {steps: 3000, global_batch: 4, log_every: 500}
        checkpoint: {folder: run, every: 1000000}
        """

    def setUp(self):
        super().setUp()
        for name, text in (("srun", self.SRUN), ("scontrol", '#!/bin/bash\necho "$@" >> scontrol.calls\n')):
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)
        (self.folder / "c.yaml").write_text("\n".join(line.strip() for line in self.CONFIG.splitlines()))
        self.environment = {**ENVIRONMENT, "PATH": f"{self.folder}:{ENVIRONMENT['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}

    def script(self, words="", signal_after=None, name="", **environment):
        """Code and output of the job. `signal_after`: a line of the output, after which its ranks get the signal `name`."""
        job = subprocess.Popen(["bash", "-c", f"bash {SOURCE}/examples/slurm.sbatch c.yaml {words} 2>&1"], cwd=self.folder,
                               env={**self.environment, **environment}, stdout=subprocess.PIPE, text=True)
        text = ""
        for line in job.stdout:
            text += line
            if signal_after and signal_after in line:
                for pid in (self.folder / "tasks").read_text().split():
                    os.kill(int(pid), getattr(signal, name))
                signal_after = None
        job.stdout.close()
        return job.wait(60), text

    def test_the_page_has_the_files(self):
        self.page = (SOURCE / "docs/slurm.md").read_text()
        for language, file in (("bash", "slurm.sbatch"), ("dockerfile", "Containerfile")):
            self.assertEqual(self.blocks(language), [(SOURCE / "examples" / file).read_text()])
        self.sh("bash -n $TESSERA/examples/slurm.sbatch")

    def test_a_job_near_its_end_is_requeued_and_goes_on(self):
        code, text = self.script(signal_after="step  499/", name="SIGUSR1")
        self.assertEqual(code, 138, text)
        self.assertIn("2 ranks (shm)", text)
        self.assertIn("requeue number 1", text)
        self.assertEqual((self.folder / "scontrol.calls").read_text(), "requeue 7\n")
        (step,) = re.findall(r"the same command resumes from run/step-0*(\d+)", text)
        code, text = self.script(SLURM_RESTART_COUNT="1")
        self.assertEqual(code, 0, text)
        self.assertRegex(text, rf"resuming from run/step-0*{step}\b")
        self.assertEqual((self.folder / "scontrol.calls").read_text(), "requeue 7\n", "a complete job is not requeued")

    def test_other_ends_are_not_requeued(self):
        os.replace(self.folder / "c.yaml", self.folder / "good.yaml")
        (self.folder / "c.yaml").write_text("base: good.yaml\ntrain: {stpes: 3}\n")
        code, text = self.script()
        self.assertEqual(code, 2, text)
        os.replace(self.folder / "good.yaml", self.folder / "c.yaml")
        code, text = self.script(signal_after="step  499/", name="SIGTERM")
        self.assertEqual(code, 143, text)
        self.assertFalse((self.folder / "scontrol.calls").exists())


class Troubleshooting(Page):
    CONFIG = """
model: {type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 1, n_head: 2}
data: {type: ByteText, path: /usr/share/common-licenses/GPL-3, seq_len: 16}
optimizer: {type: AdamW}
train: {steps: 2, global_batch: 9}
"""

    def messages(self):
        """The parts of messages that the page quotes: the code of first columns, cut at the gaps."""
        self.page = (SOURCE / "docs/troubleshooting.md").read_text()
        quoted = [text for cell in re.findall(r"(?m)^\| ([^|]*) \|", self.page) for text in re.findall(r"`([^`]+)`", cell)]
        return [part for text in quoted for part in re.split(r" ?… ?", text) if part]

    def test_every_message_is_one_of_ours(self):
        paths = [path for folder in ("src", "cli", "include", "cmake") for path in (SOURCE / folder).rglob("*") if path.suffix in (".cpp", ".h", ".cmake")]
        literals = [re.sub(r'"\s*\n\s*"', "", path.read_text()).replace('\\"', '"') for path in paths]
        messages = self.messages()
        self.assertGreater(len(messages), 40)
        unknown = [part for part in messages if not any(part in text for text in literals)]
        self.assertEqual(unknown, [])

    def test_some_of_them_appear(self):
        (self.folder / "c.yaml").write_text(self.CONFIG)
        (self.folder / "w.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" + b" " * 600)
        commands = {
            "tessera train c.yaml train.stpes=3": ["unknown key", "did you mean"],
            "tessera train -n 2 c.yaml parallel.type=DistributedDataParallel": ["ranks; expected a multiple of"],
            "tessera train c.yaml optimizer.momentum=0.9": ["an option of"],
            "tessera weights inspect w.bin": ["is a pointer of Git LFS and has no weights"],
            "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_LOCALID=0 tessera-train c.yaml": ["MASTER_ADDR and MASTER_PORT are not set"],
            "tessera run -n 2 bash -c 'if [ $RANK = 1 ]; then (until ls -d own_loop_run/step-* >/dev/null 2>&1; do sleep 0.05; done; kill -KILL $$) & fi; "
            "exec own_loop 1000000'": ["gave up in", "has died", "root cause:"],
            "ulimit -n 40; tessera run -n 90 true": ["expected fewer ranks or 'ulimit -n"],
        }
        self.messages()
        for command, parts in commands.items():
            text = self.sh(command, fails=True)
            for part in parts:
                self.assertIn(part, text, command)
                self.assertIn(part, " ".join(self.page.split()))


if __name__ == "__main__":
    unittest.main()
