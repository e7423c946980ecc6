#!/usr/bin/env python3
"""Programs with MPI of their own (tessera/mpi.h), under Open MPI and MPICH.

    mpi_test.py BUILD_FOLDER [OpenMpi|Mpich]

Hosts are processes with host names of their own, or two namespaces with a cable, which mpirun
reaches with an rsh agent of this test. Both need root.
"""
import os, pathlib, re, shutil, subprocess, sys, tempfile, unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from processes import environment
import two_hosts
from two_hosts import TwoHosts

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
LEVELS = ("single", "funneled", "serialized", "multiple")
# A launcher's variables, which belong to another world. A program with MPI does not read them.
OTHERS = {"RANK": "5", "WORLD_SIZE": "9", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1", "TESSERA_SECRET": "x"}


class Mpi:
    """What both implementations must do."""
    hosts = True  # whether the ranks of a run can have several hosts

    def setUp(self):
        if not shutil.which(f"mpirun.{self.mpi}") or not shutil.which(f"mpicxx.{self.mpi}"):
            raise unittest.SkipTest(f"no {self.mpi}; scripts/install_dependencies.sh installs {self.package}")
        self.program = BUILD / f"bin/mpi_program_{self.mpi}"
        self.assertTrue(self.program.exists(), f"{self.program}: configure again, because {self.mpi} is new here")

    # A process takes a third of a second to load libtorch, so cases that may share their processes do.
    def run_case(self, case, ranks=2, level="single", hosts=0, code=0, words=(), before=(), seconds=150, **variables):
        """The output. `hosts`: ranks with their number divided by this are on one host; 0: all are."""
        program = [self.program, level, case]
        if hosts:
            rank = f"${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}"
            program = ["unshare", "--uts", "sh", "-c", f'hostname h$(({rank} / {hosts})) && exec "$@"', "sh", *program]
        with tempfile.NamedTemporaryFile("r") as lines:
            done = subprocess.run([str(word) for word in (*before, f"mpirun.{self.mpi}", *self.options, *words, "-n", ranks, *program)],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds,
                                  env=environment(**self.variables, **variables, LINES=lines.name))
            text = done.stdout + lines.read()
        if code is not None:
            self.assertEqual(done.returncode, code, text)
        return text

    def needs_hosts(self):
        if os.geteuid() != 0 or not shutil.which("unshare"):
            raise unittest.SkipTest("host names of their own need root and unshare")

    def lines(self, text, name):
        return re.findall(rf"{name}: (.*)", text)

    def test_start_at_each_thread_level(self):
        for level, ranks in zip(LEVELS, (1, 2, 3, 4)):
            text = self.run_case("start", ranks, level, **OTHERS)
            self.assertIn("before MPI_Init: init_process_group: MPI is not initialized; expected MPI_Init", text)
            if ranks > 1:
                self.assertIn(f"backend shm, local 0 of {ranks}", text)
            self.assertNotIn("threads each", text)
            times = [float(word) for word in re.search(r"start ms(.*)", text)[1].split()]
            self.assertLess(sorted(times)[2], 1000, text)

    def test_threads_of_ranks_beyond_the_cores_are_a_warning(self):
        threads = os.cpu_count() + 1
        text = self.run_case("refused", 2, "multiple", OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
        line = rf"tessera: 2 ranks on this host compute with (\d+) threads each, and it has {os.cpu_count()} cores; expected OMP_NUM_THREADS="
        self.assertEqual(len(re.findall(line, text)), 1, text)
        # MKL, which PyTorch's wheel has, takes no more threads than there are cores.
        self.assertIn(int(re.search(line, text)[1]), (threads, os.cpu_count()), text)

    def test_communicators_beside_each_other(self):
        for ranks in (3, 4):
            self.run_case("communicators", ranks, "serialized")

    def test_wrappers_train_as_plain_libtorch(self):
        self.run_case("worlds", 4, "funneled")

    def test_wrong_calls_are_errors(self):
        text = self.run_case("refused", 3, "funneled", **OTHERS)
        self.assertEqual(len(self.lines(text, "null")), 1)
        for line in self.lines(text, "null"):
            self.assertEqual(line, "init_process_group: the communicator is MPI_COMM_NULL; expected one that this process is in")
        for name, wanted in (
                ("inter", "init_process_group: the communicator is an inter-communicator; expected one of one group"),
                ("differ", "init_process_group: rank 2: timeout is 5000 ms, and on rank 0 timeout is 60000 ms; expected the same on every rank"),
                ("timeout", "init_process_group: rank 2: timeout is 0 ms; expected a positive one"),
                ("backend", "init_process_group: rank 2: backend is TCP, and on rank 0 backend is Auto; expected the same on every rank"),
                ("thread", "init_process_group: MPI provides no calls on this thread; expected the thread that called MPI_Init")):
            self.assertEqual(len(self.lines(text, name)), 3, text)
            for line in self.lines(text, name):
                self.assertTrue(line.startswith(wanted), line)

    def test_a_rank_that_does_not_come(self):
        text = self.run_case("absent", 3, code=None)
        self.assertEqual(len(self.lines(text, "absent")), 2, text)
        for line in self.lines(text, "absent"):
            self.assertTrue(line.startswith("init_process_group: not all ranks of the communicator have called it"), line)

    def test_a_killed_rank_ends_the_job(self):
        for case, level in (("killed", "single"), ("killed_mpi", "multiple")):
            text = self.run_case(case, 3, level, code=None)
            self.assertRegex(text, self.death)

    def test_the_process_stays_as_it_was(self):
        for ranks in (2, 4):
            self.run_case("effects", ranks)
        self.run_case("tuned", 2)

    def test_a_group_that_outlives_mpi(self):
        text = self.run_case("outlives", 2)
        self.assertEqual(self.lines(text, "after MPI_Finalize"), ["nothing"] * 2)
        self.assertEqual(set(self.lines(text, "again")), {"init_process_group: MPI has ended; expected a call before MPI_Finalize"})
        text = self.run_case("outlives_mpi", 2, "multiple")
        for line in self.lines(text, "after MPI_Finalize"):
            self.assertIn("backend MPI: the group is used after MPI_Finalize; expected its last use before", line)
        self.assertIn("a process group with backend MPI is destroyed after MPI_Finalize", text)

    def test_data_over_mpi_on_one_host(self):
        self.run_case("worlds_mpi,communicators_mpi", 4, "multiple")

    def test_data_between_hosts(self):
        self.needs_hosts()
        self.run_case("communicators,communicators_mpi,wrappers,wrappers_mpi", 4, "multiple", hosts=2)
        self.run_case("wrappers_mpi", 3, "multiple", hosts=1)

    def test_too_few_threads_use_tcp_and_say_so(self):
        self.needs_hosts()
        text = self.run_case("communicators_mpi", 4, "serialized", hosts=2)
        line = "travel over TCP, because MPI provides MPI_THREAD_SERIALIZED; expected MPI_THREAD_MULTIPLE"
        self.assertIn(line, text)
        self.assertIn(line.replace("SERIALIZED", "SINGLE"), self.run_case("communicators", 4, "single", hosts=2))
        self.assertNotIn("over TCP", self.run_case("communicators", 4, "single"))

    def test_between_hosts_the_faster_way_is_measured(self):
        self.needs_hosts()
        text = self.run_case("start", 4, "multiple", hosts=2)
        chosen = re.findall(r"messages between hosts use (\w+).*; measured .*/s, MPI: [0-9.]+ Gbit/s", text)
        self.assertTrue(chosen, text)
        self.assertIn(f"backend {'mpi' if chosen[0] == 'MPI' else 'tcp'}, local 0 of 2", text)
        text = self.run_case("start", 4, "multiple", hosts=2, GLOO_SOCKET_IFNAME="lo")
        self.assertIn("backend tcp, local 0 of 2", text)
        self.assertNotIn("measured", text)

    def test_two_hosts_that_mpirun_reaches_with_an_agent(self):
        try:
            hosts = TwoHosts()
        except OSError as error:
            raise unittest.SkipTest(f"no namespaces: {error}")
        self.addCleanup(hosts.remove)
        two_hosts.ip("-n", hosts.names[0], "address", "del", two_hosts.SECOND_ADDRESS + "/24", "dev", hosts.cables[0])
        with tempfile.TemporaryDirectory() as folder:
            agent, before = hosts.rsh_agent(folder), hosts.mpirun()
            places = ",".join(address + ":2" for address in two_hosts.ADDRESSES)
            words = [word.format(agent=agent, places=places, cable=hosts.cables[0]) for word in self.two_hosts]
            text = self.run_case("start", 4, "single", before=before, words=words, UCX_TLS="tcp,self")
            self.assertIn("backend tcp, local 0 of 2", text)
            # The last with TCP beside MPI.
            text = self.run_case("communicators_mpi,wrappers_mpi,compare", 4, "multiple", before=before, words=words,
                                 UCX_TLS="tcp,self", GLOO_SOCKET_IFNAME=",".join(hosts.cables))
            self.assertRegex(self.lines(text, "64 MiB ms")[0], r"^ ?tcp [\d.]+ mpi [\d.]+$")
            print(*self.lines(text, "64 MiB ms"), end=" ", flush=True)

    def test_exit_without_the_end_of_a_group(self):
        self.run_case("exits", 3, "multiple", code=None, seconds=60)

    def test_three_gigabytes(self):
        available = int(re.search(r"MemAvailable: +(\d+)", pathlib.Path("/proc/meminfo").read_text())[1])
        if available < 10 << 20:
            raise unittest.SkipTest("less than 10 GiB of memory are free")
        self.run_case("large", 2, "multiple", seconds=300)


class OpenMpi(Mpi, unittest.TestCase):
    mpi, package = "openmpi", "libopenmpi-dev and openmpi-bin"
    options = ["--oversubscribe"]
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    death = r"exited on\s+signal 9"
    # Open MPI 5 with --oversubscribe puts all ranks on the first host, unless told how many each gets.
    two_hosts = ["--mca", "plm_rsh_agent", "{agent}", "--mca", "btl_tcp_if_include", "192.0.2.0/24", "--map-by", "ppr:2:node", "--host", "{places}"]


class Mpich(Mpi, unittest.TestCase):
    mpi, package = "mpich", "libmpich-dev and mpich"
    options = []
    variables = {}
    death = r"BAD TERMINATION[^$]*EXIT CODE: 9"
    two_hosts = ["-launcher", "rsh", "-launcher-exec", "{agent}", "-iface", "{cable}", "-hosts", "{places}"]

    def test_a_killed_rank_is_named_if_mpich_leaves_the_others(self):
        for case in ("killed", "killed_mpi"):
            for _ in range(10):  # mpirun's proxy kills the others all the same in some runs
                text = self.run_case(case, 3, "multiple", code=None, words=["-disable-auto-cleanup"])
                if len(self.lines(text, "killed")) == 2:
                    break
            version = subprocess.run(["mpichversion"], capture_output=True, text=True, timeout=60).stdout
            if not self.lines(text, "killed") and re.search(r"MPICH Version:\s+(4\.[2-9]|[5-9])", version):
                self.skipTest("this MPICH ends the others")
            self.assertEqual(len(self.lines(text, "killed")), 2, text)
            for line in self.lines(text, "killed"):
                self.assertRegex(line, r"rank [02] of 3 gave up in barrier.*: rank 1 ")


if __name__ == "__main__":
    program = unittest.main(exit=False)
    tried, skipped = program.result.testsRun, len(program.result.skipped)
    sys.exit(1 if not program.result.wasSuccessful() else 77 if tried == skipped else 0)
