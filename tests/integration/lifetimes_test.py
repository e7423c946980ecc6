#!/usr/bin/env python3
"""Objects of the library may be local, static, global, leaked or inherited by a forked child, in all surroundings: the program ends with 0, once,
and a child leaves its parent's world alone. With real processes.

    lifetimes_test.py BUILD_FOLDER [all] [TEST…]    all: every object alone in every lifetime and backend; otherwise all objects in one
    program, and over tcp and gloo the lifetimes early and fork_exit alone
"""
import itertools, os, pathlib, re, shutil, subprocess, sys, tempfile, time, unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from containers import NOBODY, in_mounts, why_not
from processes import environment

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
ALL = "all" in sys.argv and not sys.argv.remove("all")
TESSERA, PROBE = str(BUILD / "bin/tessera"), str(BUILD / "bin/lifetimes_probe")

OBJECTS = ("group", "zero", "ddp", "fsdp", "distributed", "local_sgd", "store", "join", "loader")
LIFETIMES = ("local", "static", "filled", "early", "leaked", "exit", "fork_exit", "fork__exit", "fork_return", "fork_use")
BACKENDS = ("auto", "tcp", "gloo")
EVERY = ",".join(OBJECTS)  # in one program


# Starts the program as two ranks without a launcher of ours, and ends with the first status that is not 0.
TWO = ["sh", "-c", """
be() { for v in $RANK_VARIABLES; do export $v=$1; done; }
be 0; "$0" & first=$!
be 1; "$0"; second=$?
wait $first && exit $second"""]
LAUNCHERS = {
    "torchrun": {"RANK_VARIABLES": "RANK LOCAL_RANK", "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29517,
                 "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"},
    "Open MPI": {"RANK_VARIABLES": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 2},
    "Slurm": {"RANK_VARIABLES": "SLURM_PROCID SLURM_LOCALID", "SLURM_NTASKS": 2, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 1,
              "SLURM_JOB_ID": 4711, "SLURM_STEP_ID": 0},
}


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def require(self, front):
        if why := why_not(front):
            self.skipTest(why)
        return front

    def run_probe(self, front=(), launcher=(TESSERA, "run", "-n", "2", "--max-restarts", "1", "--restart-delay", "0"), timeout=60, cwd=None,
                  **more):
        """Both ranks end with 0 and say so once. Returns the output."""
        # exit() in a child waits for autograd's threads for devices, which fork() did not copy: 10 s, or as long as this says.
        # Debian 13's libtorch has such a thread without a device.
        env = environment(**{"TMPDIR": str(self.folder), "XDG_RUNTIME_DIR": "", "PROBE_FOLDER": str(self.folder / "run"),
                             "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT": "1", **{k: str(v) for k, v in more.items()}})
        process = subprocess.Popen([*front, *launcher, PROBE], env=env, cwd=cwd or self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, start_new_session=True)
        try:
            text, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            self.fail(f"no end within {timeout} s:\n{process.communicate()[0]}")
        self.assertEqual(process.returncode, 0, text)
        self.assertEqual(sorted(re.findall(r"done (\d)", text)), ["0", "1"], text)
        self.assertNotRegex(text, "restart|root cause|first failure")
        return text


class Lifetimes(Case):
    def check(self, backend, object_, lifetime):
        with self.subTest(backend=backend, object=object_, lifetime=lifetime):
            shutil.rmtree(self.folder / "run", ignore_errors=True)
            text = self.run_probe(PROBE_BACKEND=backend, PROBE_OBJECT=object_, PROBE_LIFETIME=lifetime)
            self.assertEqual(len(re.findall({"auto": "on shm", "tcp": "on tcp", "gloo": "on gloo"}[backend], text)), 2, text)
            left = [f for f in os.listdir(self.folder) if f.startswith("tessera-rdzv-")]
            self.assertEqual(left, [])

    def test_a_program_ends_well_whatever_outlives_main(self):
        for backend, object_ in itertools.product(BACKENDS, OBJECTS if ALL else (EVERY,)):
            for lifetime in LIFETIMES if ALL or backend == "auto" else ("early", "fork_exit"):
                self.check(backend, object_, lifetime)


class Surroundings(Case):
    """Every surroundings with the objects that end last."""

    def every(self, *more_lifetimes, **more):
        for object_, lifetime in [(EVERY, "early"), (EVERY, "fork_exit"), *more_lifetimes]:
            with self.subTest(object=object_, lifetime=lifetime):
                self.run_probe(PROBE_OBJECT=object_, PROBE_LIFETIME=lifetime, **more)

    def test_a_launcher_that_is_not_ours(self):
        for name, variables in LAUNCHERS.items():
            with self.subTest(launcher=name):
                self.every(launcher=TWO, **variables)
                self.run_probe(launcher=TWO, PROBE_WORLDS=2, **variables)

    def test_a_global_locale_that_groups_digits(self):
        for name, variables in LAUNCHERS.items():
            with self.subTest(launcher=name):
                self.run_probe(launcher=TWO, PROBE_LOCALE="grouping", **variables)
        for backend in BACKENDS:
            self.every((EVERY, "static"), PROBE_LOCALE="grouping", PROBE_BACKEND=backend)

    def test_a_c_locale_with_a_decimal_comma(self):
        made = subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", self.folder / "de_DE.UTF-8"], capture_output=True, text=True)
        if made.returncode != 0:
            self.skipTest(made.stderr)
        self.every((EVERY, "static"), PROBE_LOCALE="de_DE.UTF-8", LOCPATH=self.folder)

    def test_a_tmp_whose_usual_folder_belongs_to_another_user(self):
        usual = f"/tmp/tessera-{os.geteuid()}"
        # What else is in /tmp stays there: a build folder, or libtorch.
        others = 'for d in /mnt/*/; do case $d in /mnt/tessera-*) ;; *) to="/tmp/${d#/mnt/}"; mkdir -p "$to" && mount --bind "$d" "$to" || true;; esac; done'
        front = self.require(in_mounts("mount --bind /tmp /mnt", "mount -t tmpfs none /tmp", "chmod 1777 /tmp", others, f"mkdir {usual}", f"chown {NOBODY} {usual}"))
        here = {"TMPDIR": "/dev/shm", "PROBE_FOLDER": "/tmp/run"}  # self.folder is hidden
        for name, variables in LAUNCHERS.items():
            with self.subTest(launcher=name):
                self.every(front=front, cwd="/", launcher=TWO, **here, **variables)

    def test_a_rendezvous_folder_that_is_removed_while_the_ranks_run(self):
        for backend in BACKENDS:
            self.every(PROBE_GONE=1, PROBE_BACKEND=backend)

    def test_the_launcher_is_the_first_process(self):
        self.every(front=self.require(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]))

    def test_a_live_folder_of_another_host_on_one_tmpdir_stays(self):
        boot = "0123456789abcdef0123456789abcdef"
        own = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        space = os.stat("/proc/self/ns/pid").st_ino
        foreign, stale = (self.folder / f"tessera-rdzv-{b}.{space}-4194303-1-abcdef" for b in (boot, own))
        for folder in (foreign, stale):
            folder.mkdir(mode=0o700)
        self.every()
        self.assertTrue(foreign.exists())
        self.assertFalse(stale.exists())

    def test_a_console_that_nobody_reads(self):
        """Until the ranks are done. Each prints more than the console and the launcher hold."""
        for object_, lifetime in (("zero", "filled"), ("group", "fork_exit")):
            done = self.folder / f"done-{object_}-"
            env = environment(TMPDIR=str(self.folder), XDG_RUNTIME_DIR="", PROBE_OBJECT=object_, PROBE_LIFETIME=lifetime, PROBE_NOISE="4", PROBE_DONE=str(done))
            process = subprocess.Popen([TESSERA, "run", "-n", "2", PROBE], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT, text=True, start_new_session=True)
            self.addCleanup(process.stdout.close)
            self.addCleanup(lambda process=process: process.poll() is None and os.killpg(process.pid, 9))
            until = time.monotonic() + 60
            while not all(pathlib.Path(f"{done}{rank}").exists() for rank in (0, 1)):
                self.assertLess(time.monotonic(), until, "the ranks are not done")
                self.assertIsNone(process.poll())
                time.sleep(0.05)
            text, _ = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 0, text[-2000:])
            self.assertRegex(text, r"(?m)^tessera run: \d{6,} bytes of output are missing here, because the output was not read$")

    def test_folders_without_locks(self):
        """As on Lustre without the option flock. Checkpoints do without locks; a TMPDIR without them is an error that says so."""
        lacks = {"LD_PRELOAD": BUILD / "lib/libfailing_files.so", "FAILING_FILES_LACKS": "flock", "FAILING_FILES_UNDER": self.folder}
        with tempfile.TemporaryDirectory(dir="/dev/shm") as local:
            self.every(TMPDIR=local, **lacks)
        env = environment(TMPDIR=str(self.folder), XDG_RUNTIME_DIR="", **{k: str(v) for k, v in lacks.items()})
        done = subprocess.run([TESSERA, "run", "-n", "2", PROBE], env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 5, done.stderr)
        self.assertIn(f"{self.folder}/", done.stderr)
        # libtorch 2.6 does not name the function.
        self.assertRegex(done.stderr, r"/store: (flock: )?Function not implemented; expected a file system with flock\(\): set TMPDIR to a local folder")

    def test_many_worlds_cost_little_memory(self):
        def resident(worlds):
            text = self.run_probe(PROBE_WORLDS=worlds, timeout=120)
            return max(int(kb) for kb in re.findall(r"VmRSS:\s+(\d+) kB", text)) / 1024

        few = resident(10)
        self.assertLess(resident(210) - few, 8)


if __name__ == "__main__":
    unittest.main(verbosity=2)
