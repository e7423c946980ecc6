#!/usr/bin/env python3
"""Ranks started by srun, in a Slurm cluster that the test starts: OneHost on loopback, TwoHosts in two network namespaces. Exits
with 77, and prints the reason, if Slurm is not installed or does not start, or if namespaces cannot be made.

    srun_test.py BUILD_FOLDER OneHost | TwoHosts
"""
import getpass, os, pathlib, re, shutil, signal, socket, subprocess, sys, tempfile, time, unittest

from faults_test import BUILD, TIMEOUT_MS, Run
import two_hosts

SKIPPED = 77
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
for outer in [name for name in os.environ if name.startswith(("SLURM_", "SRUN_", "PMI", "OMPI_", "LOCAL_", "OPENBLAS_CORETYPE"))]:
    del os.environ[outer]  # the test itself may run in a step of a job
os.environ["OMP_NUM_THREADS"] = "1"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def loopback(address):
    return address.startswith("127.")


class Cluster:
    """Slurm with a node at each of `addresses`. `enter(host)` is the prefix of commands that run on that host."""

    def __init__(self, addresses, enter):
        absent = [name for name in ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "sinfo", "scancel") if not shutil.which(name, path=PATH)]
        if absent:
            raise unittest.SkipTest(f"no {', '.join(absent)} here; they are in Debian's slurm-wlm and munge")
        self.enter, self.daemons = enter, []
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tessera-slurm-"))
        self.folder.chmod(0o711)  # munged requires that all users can reach its socket
        self.conf = self.folder / "slurm.conf"
        nodes = [f"node{i}" for i in range(len(addresses))]
        self.conf.write_text("\n".join([
            "ClusterName=tessera", f"SlurmctldHost=localhost({addresses[0]})", f"SlurmUser={getpass.getuser()}", f"SlurmdUser={getpass.getuser()}",
            "AuthType=auth/munge", f"AuthInfo=socket={self.folder}/munge", f"SlurmctldPort={free_port()}",
            "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny" if loopback(addresses[0]) else "", f"StateSaveLocation={self.folder}/state", f"SlurmdSpoolDir={self.folder}/%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid", f"SlurmdPidFile={self.folder}/%n.pid", "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none", "SwitchType=switch/none", "MpiDefault=none", "ReturnToService=2",
            "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "SlurmdParameters=config_overrides", "InactiveLimit=0", "KillWait=5",
            *(f"NodeName={node} NodeAddr={address} NodeHostname={socket.gethostname()} Port={free_port()} CPUs=4" for node, address in zip(nodes, addresses)),
            "PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:8", ""]))
        os.environ["SLURM_CONF"] = str(self.conf)
        key = self.folder / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        (self.folder / "state").mkdir()
        try:
            self.daemon(0, "munged", "-F", f"--key-file={key}", f"--socket={self.folder}/munge", f"--pid-file={self.folder}/munge.pid",
                        f"--log-file={self.folder}/munge.log", f"--seed-file={self.folder}/seed")
            self.wait_for((self.folder / "munge").exists, "munged's socket")
            self.daemon(0, "slurmctld", "-D", "-f", self.conf)
            for host, node in enumerate(nodes):
                (self.folder / node).mkdir()
                self.daemon(host, "slurmd", "-D", "-f", self.conf, "-N", node)
            self.wait_for(lambda: self.idle_nodes() == len(nodes), "all nodes are idle")
        except BaseException:
            self.stop()
            raise

    def daemon(self, host, name, *words):
        with (self.folder / f"{name}{host}.out").open("w") as out:
            command = [*self.enter(host), shutil.which(name, path=PATH), *map(str, words)]
            self.daemons.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out))

    def idle_nodes(self):
        done = subprocess.run([*self.enter(0), "sinfo", "-h", "-o", "%D", "-t", "idle"], capture_output=True, text=True, timeout=20)
        return sum(map(int, done.stdout.split()))

    def wait_for(self, condition, what):
        end = time.monotonic() + 30
        while not condition():
            if time.monotonic() > end or any(daemon.poll() is not None for daemon in self.daemons):
                output = "\n".join(path.read_text() for path in self.folder.glob("*.out"))
                raise unittest.SkipTest(f"Slurm does not start here: {what}: not within 30 s, or a daemon ended:\n{output}")
            time.sleep(0.05)

    def run(self, *words):
        return Run(*self.enter(0), *words, env=dict(os.environ))  # with SLURM_CONF

    def stop(self):
        subprocess.run([*self.enter(0), "scancel", "-f", "-s", "KILL", "-u", getpass.getuser()], capture_output=True, timeout=60)  # jobs of a failed test
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


class SlurmTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.config = pathlib.Path(folder.name) / "config.yaml"
        self.config.write_text(
            "model: {type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 1, n_head: 2, seed: 3}\n"
            "data: {type: ByteText, path: /usr/share/common-licenses/GPL-3, seq_len: 16}\n"
            "optimizer: {type: AdamW, lr: 1e-3}\n"
            "parallel: {type: ZeroRedundancyOptimizer}\n"
            "train: {steps: 2, global_batch: 12}\n")

    def trains(self, ranks, *words):
        code, text = self.ends(*words, BUILD / "bin/tessera-train", self.config)
        self.assertEqual(code, 0, text)
        self.assertEqual(re.findall(r"(\d+) ranks \(shm\)", text), [str(ranks)], text)

    def ends(self, *words):
        run = self.cluster.run(*words)
        self.addCleanup(run.close)
        code = run.process.wait(90)
        run.reader.join(5)
        return code, run.text()

    def probe(self, *front, exports="", secret="unused on one host"):
        """Starts a world that trains until it is ended, and waits until all its ranks train."""
        ranks = int(front[front.index("-n") + 1])
        run = self.cluster.run("env", f"TESSERA_SECRET={secret}", "srun", *front, "bash", "-c", f"{exports} GROUP_RANK=$SLURM_NODEID exec {BUILD}/bin/fault_probe auto {TIMEOUT_MS}")
        self.addCleanup(run.close)
        run.wait_for(lambda: len(run.pids) == ranks or run.process.poll() is not None, 60, "all ranks train")
        self.assertEqual(sorted(run.pids), list(range(ranks)), run.text())
        return run

    def lose(self, run, victim, srun_waits=True):
        os.kill(run.pids[victim], signal.SIGKILL)
        for survivor in set(run.pids) - {victim} if srun_waits else ():
            pattern = rf"survivor {survivor} blames {victim}:"
            run.wait_for(lambda: run.when(pattern), 5, pattern)
        self.assertNotEqual(run.process.wait(15), 0, run.text())
        run.reader.join(5)
        self.assertRegex(run.text(), rf"srun: error: \S+ task {victim}: Killed")


class OneHost(SlurmTest):
    @classmethod
    def setUpClass(cls):
        address = socket.gethostbyname(socket.gethostname())  # where Slurm's daemons listen if not on all addresses
        if not loopback(address):
            raise unittest.SkipTest(f"{socket.gethostname()} is {address}, on which Slurm would listen; expected a loopback address")
        cls.cluster = Cluster([address], lambda host: [])
        cls.addClassCleanup(cls.cluster.stop)

    def test_tessera_train(self):
        self.trains(2, "srun", "-n", "2")
        self.trains(6, "srun", "-n", "6", "--overcommit")

    def test_an_error_is_printed_once(self):
        code, text = self.ends("srun", "-n", "3", BUILD / "bin/tessera-train", self.config, "train.stepz=3")
        self.assertEqual(code, 2, text)
        self.assertEqual(text.count("stepz"), 1, text)

    def test_steps_of_one_job_one_by_one_and_at_once(self):
        step = f"srun --overlap -n 2 {BUILD}/bin/tessera-train {self.config}"
        code, text = self.ends("salloc", "-n", "4", "bash", "-c", f"set -e; {step}; {step}; {step} & first=$!; {step}; wait $first")
        self.assertEqual(code, 0, text)
        self.assertEqual(len(re.findall(r"2 ranks \(shm\)", text)), 4, text)

    def test_other_ways_to_start(self):
        self.trains(2, "srun", "--mpi=pmi2", "-n", "2")
        self.trains(2, "salloc", "-n", "4", "srun", "-E", "-n", "2")

    def test_a_batch_script_is_not_a_rank(self):
        script, out = self.config.with_name("script"), self.config.with_name("out")
        script.write_text(f"#!/bin/bash\nset -e\n{BUILD}/bin/tessera-train {self.config} parallel.type=none\n{BUILD}/bin/tessera train -n 2 {self.config}\n")
        code, text = self.ends("sbatch", "-W", "-n", "2", "-o", out, script)
        self.assertEqual(code, 0, text + out.read_text())
        self.assertIn("2 ranks (shm)", out.read_text())

    def test_a_lost_rank_ends_all(self):
        self.lose(self.probe("-n", "3"), 1)
        self.lose(self.probe("-n", "3", "-K1"), 0, srun_waits=False)

    def test_scancel_ends_it_after_the_current_step(self):
        run = self.cluster.run("srun", "-J", "cancelled", "-n", "2", BUILD / "bin/tessera-train", self.config, "train.steps=1000000", "train.log_every=100")
        self.addCleanup(run.close)
        run.wait_for(lambda: run.when(r"step +199/"), 60, "it trains")
        self.assertEqual(self.ends("scancel", "-n", "cancelled")[0], 0)
        self.assertEqual(run.process.wait(30), 128 + signal.SIGTERM, run.text())
        run.reader.join(5)
        self.assertRegex(run.text(), r"interrupted at step \d+")

    def test_the_script_of_the_documentation_requeues_its_job(self):
        script = pathlib.Path(__file__).resolve().parents[2] / "examples/slurm.sbatch"
        out = self.config.with_name("out")
        config = self.config.read_text().replace("steps: 2", "steps: 1000000, log_every: 100") + f"checkpoint: {{folder: {self.config.parent}/run}}\n"
        self.config.write_text(config)
        code, text = self.ends("env", f"PATH={BUILD}/bin:{os.environ['PATH']}", "sbatch", "--parsable", "-N", "1", "--ntasks-per-node=2", "-c", "1", "-o", out,
                               script, self.config)
        self.assertEqual(code, 0, text)
        job = text.split()[0]
        self.addCleanup(lambda: self.ends("scancel", job))

        def wait_for(pattern, seconds):
            end = time.monotonic() + seconds
            while not (out.exists() and re.search(pattern, out.read_text())):
                self.assertLess(time.monotonic(), end, out.read_text() if out.exists() else "no output")
                time.sleep(0.1)

        wait_for(r"step +199/", 60)
        self.assertEqual(self.ends("scancel", "--signal=USR1", job)[0], 0)  # to the steps, as near the end of the time
        wait_for("requeue number 1", 30)
        self.assertRegex(out.read_text(), r"resumes from \S+/run/step-\d+")
        end = time.monotonic() + 30
        while " Restarts=1 " not in self.ends("scontrol", "show", "job", job)[1]:
            self.assertLess(time.monotonic(), end, self.ends("scontrol", "show", "job", job)[1])
            time.sleep(0.2)


class TwoHosts(SlurmTest):
    @classmethod
    def setUpClass(cls):
        try:
            hosts = two_hosts.TwoHosts()
        except OSError as error:
            raise unittest.SkipTest(f"two network namespaces cannot be made here (needs root): {error}")
        cls.addClassCleanup(hosts.remove)
        cls.cluster = Cluster(two_hosts.ADDRESSES, lambda host: ["nsenter", f"--net=/run/netns/{hosts.names[host]}"])
        cls.addClassCleanup(cls.cluster.stop)

    def test_a_rank_of_each_is_lost(self):
        for victim in (3, 0):
            run = self.probe("--ntasks-per-node=2", "-n", "4", exports=f"MASTER_ADDR={two_hosts.ADDRESSES[0]} MASTER_PORT=29874",
                             secret="shared by all hosts")
            self.assertNotIn("has no secret", run.text())
            for rank in range(4):
                self.assertIn(f"rank {rank}: right sum of 4 on tcp", run.text())
                self.assertIn(f"rank {rank}: right sum of 2 on shm", run.text())
                self.assertIn(f"rank {rank}: local rank {rank % 2} of 2", run.text())
            self.lose(run, victim)

    def test_without_an_address_the_first_host_of_the_step_is_used(self):
        code, text = self.ends("srun", "--ntasks-per-node=1", "-n", "2", BUILD / "bin/tessera-train", self.config)
        self.assertEqual(code, 2, text)  # nothing resolves Slurm's names of these hosts
        self.assertRegex(text, "rank 1: MASTER_ADDR is 'node0': .*; expected a name or an address of the host of rank 0")

    def test_a_step_on_one_of_the_hosts_needs_no_address(self):
        self.trains(2, "salloc", "-N", "2", "-n", "4", "srun", "-N", "1", "-n", "2")


if __name__ == "__main__":
    result = unittest.main(exit=False).result
    for _, reason in result.skipped:
        print(f"srun_test: could not run: {reason}", file=sys.stderr)
    sys.exit(1 if not result.wasSuccessful() else SKIPPED if result.skipped else 0)
