#!/usr/bin/env python3
"""A world on two hosts, which are two connected network namespaces with a launcher in each. Exits with 77 if namespaces cannot
be made.

    hosts_test.py BUILD_FOLDER
"""
import os, pathlib, re, shutil, signal, subprocess, sys, tempfile, time, unittest

from faults_test import BUILD, TIMEOUT_MS, Run, write_config
from each_test import run_each
from processes import is_running
from two_hosts import ADDRESSES, JUNK, SECOND_ADDRESS, TwoHosts

SKIPPED = 77
HOSTS, RANKS_PER_HOST = 2, 2
RANKS = HOSTS * RANKS_PER_HOST
WORLD = None  # the two hosts

ANSWERS = """
# Whether a connection to ADDRESS PORT is accepted
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)
    print("yes")
except OSError as error:
    print(error.strerror)
"""

GREETS = """
# Sends a greeting to whoever connects to ADDRESS PORT
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("ready", flush=True)
    while True:
        server.accept()[0].sendall(b"220 another service" + bytes([13, 10]))
"""


def in_host(host, *words):
    return WORLD.command(host, *words)


class Hosts(unittest.TestCase):
    def launch(self, host, port, *program, address=ADDRESSES[0], secret="shared by all hosts", front=()):
        """Starts the launcher of one host. `front` is what comes before the command."""
        secret = [] if secret is None else [f"TESSERA_SECRET={secret}"]
        run = Run(*in_host(host, *front, "env", *secret, BUILD / "bin/tessera", "run", "--nnodes", HOSTS, "--node-rank", host, "-n", RANKS_PER_HOST,
                           "--master-addr", address, "--master-port", port, *program))
        self.addCleanup(run.close)
        return run

    def launch_both(self, port, *program, **how):
        return [self.launch(host, port, *program, **how) for host in range(HOSTS)]

    def probe(self, host, port, backend="auto", **how):
        return self.launch(host, port, BUILD / "bin/fault_probe", backend, TIMEOUT_MS, **how)

    def background(self, host, program, *arguments):
        process = subprocess.Popen(in_host(host, sys.executable, "-c", program, *arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait, 10)
        self.addCleanup(process.kill)
        return process

    def start(self, backend, port, **how):
        runs = [self.probe(host, port, backend, **how) for host in range(HOSTS)]
        self.train(runs)
        return runs

    def train(self, runs):
        for run in runs:
            run.wait_for(lambda: len(run.pids) == RANKS_PER_HOST or run.process.poll() is not None, 60, "all ranks train")
            self.assertEqual(len(run.pids), RANKS_PER_HOST, run.text())

    def kill(self, victim, backend, port):
        runs = self.start(backend, port)
        for rank in range(RANKS):
            text = runs[rank // RANKS_PER_HOST].text()
            self.assertIn(f"rank {rank}: right sum of {RANKS} on tcp", text)
            self.assertIn(f"rank {rank}: local rank {rank % RANKS_PER_HOST} of {RANKS_PER_HOST}", text)
            self.assertIn(f"rank {rank}: right sum of {RANKS_PER_HOST} on {'tcp' if backend == 'tcp' else 'shm'}", text)
        os.kill(runs[victim // RANKS_PER_HOST].pids[victim], signal.SIGKILL)
        for survivor in set(range(RANKS)) - {victim}:
            run = runs[survivor // RANKS_PER_HOST]
            pattern = rf"survivor {survivor} blames {victim}:"
            run.wait_for(lambda: run.when(pattern), 5, pattern)
        for run in runs:
            self.assertNotEqual(run.process.wait(15), 0, run.text())
        near = runs[victim // RANKS_PER_HOST]
        self.assertTrue(near.when(rf"root cause: rank {victim} .*SIGKILL"), near.text())
        self.began_elsewhere(next(run for run in runs if run is not near), victim)

    def began_elsewhere(self, run, rank):
        run.reader.join(5)
        self.assertRegex(run.text(), rf"the failure began on rank {rank}, which is on another host")
        self.assertNotIn("root cause", run.text())

    def test_messages_within_a_host_too(self):
        self.kill(3, "tcp", 29871)

    def test_shared_memory_within_a_host(self):
        self.kill(2, "auto", 29872)

    def test_the_rank_that_serves_the_store(self):
        self.kill(0, "auto", 29873)

    def test_a_rank_that_waits_in_another_group_than_its_neighbour(self):
        runs = [self.launch(host, 29874, BUILD / "bin/fault_probe", "auto", 20000, "apart") for host in range(HOSTS)]
        self.train(runs)
        for rank in range(RANKS):
            run = runs[rank // RANKS_PER_HOST]
            run.wait_for(lambda: run.when(f"rank {rank} waits apart"), 20, f"rank {rank} waits")
        time.sleep(0.3)  # they wait in their collectives
        os.kill(runs[1].pids[2], signal.SIGKILL)
        # Rank 0 fails in a group of ranks 0, 2 and 3, the others in that of all ranks.
        for survivor, blamed in ((0, r"1: .*rank 0 of 3 "), (1, r"2: .*rank 1 of 4 "), (3, r"2: .*rank 3 of 4 ")):
            run = runs[survivor // RANKS_PER_HOST]
            pattern = rf"survivor {survivor} blames {blamed}"
            run.wait_for(lambda: run.when(pattern), 5, pattern)
        for run in runs:
            self.assertNotEqual(run.process.wait(15), 0, run.text())
            run.reader.join(5)
        self.assertRegex(runs[1].text(), "root cause: rank 2 .*SIGKILL")
        self.began_elsewhere(runs[0], 2)

    def test_junk_before_and_during_the_start_keeps_no_rank_out(self):
        port = 29875
        for count, words in ((1, "00"), (300, ""), (50, b"GET / HTTP/1.1\r\n\r\n".hex())):
            self.background(1, JUNK, ADDRESSES[0], port, count, words)
        time.sleep(0.5)
        runs = self.start("auto", port)
        for run in runs:
            self.assertNotIn("refused", run.text())
            self.assertNotIn("has no secret", run.text())

    def test_the_store_listens_on_the_address_of_master_addr_alone(self):
        port = 29876
        self.start("auto", port)
        answer = lambda address: subprocess.run(in_host(1, sys.executable, "-c", ANSWERS, address, port), capture_output=True, text=True, timeout=20).stdout
        self.assertEqual(answer(ADDRESSES[0]), "yes\n")
        self.assertEqual(answer(SECOND_ADDRESS), "Connection refused\n")

    def test_another_secret_is_an_error_on_both_hosts_at_once(self):
        for port, near, far, mine, theirs in ((29877, "secret number one", "secret number two", "rank 0 has another secret", "has another secret than rank 0"),
                                              (29878, "secret number one", None, "rank 0 has a secret and this rank none", "has no secret, and rank 0 has one"),
                                              (29879, None, "secret number two", "this rank has a secret and rank 0 none", "has a secret, and rank 0 has none")):
            runs = [self.probe(0, port, secret=near), self.probe(1, port, secret=far)]
            runs[1].wait_for(lambda: runs[1].process.poll() is not None, 20, "the far ranks end")
            self.assertLess(runs[1].process.wait(), 128, runs[1].text())
            runs[1].reader.join(5)
            self.assertRegex(runs[1].text(), rf"rank [23] on host \S+: .*{mine}.*TESSERA_SECRET")
            pattern = rf"refused a connection from {ADDRESSES[1]}: it calls itself rank [23] and {theirs}; .*TESSERA_SECRET"
            runs[0].wait_for(lambda: runs[0].when(pattern), 5, pattern)
            self.assertIsNone(runs[0].process.poll(), "rank 0 serves on")
            runs[0].close()

    def test_a_world_without_a_secret_runs_and_says_so_once(self):
        runs = self.start("auto", 29880, secret=None)
        pattern = rf"anyone who reaches {ADDRESSES[0]}:29880 can join this world, because it has no secret; set TESSERA_SECRET"
        self.assertEqual(sum(len(re.findall(pattern, run.text())) for run in runs), 1, runs[0].text())

    def test_another_service_at_the_port_ends_no_rank_by_a_signal(self):
        service = self.background(0, GREETS, ADDRESSES[0], 29881)
        self.assertEqual(service.stdout.readline(), "ready\n")
        far = self.probe(1, 29881)
        self.assertLess(far.process.wait(30), 128, far.text())
        far.reader.join(5)
        self.assertRegex(far.text(), r"rank [23] of 4 could not use the store at .*29881 .*another protocol; another service may answer there")
        near = self.probe(0, 29881)
        self.assertLess(near.process.wait(30), 128, near.text())
        near.reader.join(5)
        self.assertRegex(near.text(), r"rank 0 cannot serve the store at .*29881 .*in use; expected a free port")

    def test_a_name_that_is_loopback_on_its_own_host(self):
        with tempfile.TemporaryDirectory() as folder:
            runs = []
            for host, line in enumerate(("127.0.1.1 first.invalid", f"{ADDRESSES[0]} first.invalid")):
                hosts = pathlib.Path(folder, str(host))
                hosts.write_text(line + "\n")
                # ip netns exec has made a mount namespace for this command
                front = ["sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
                runs.append(self.probe(host, 29882, address="first.invalid", front=front))
            self.train(runs)

    def test_an_address_of_another_host_is_an_error_that_names_it(self):
        run = self.probe(0, 29883, address=ADDRESSES[1])
        self.assertLess(run.process.wait(30), 128, run.text())
        run.reader.join(5)
        self.assertRegex(run.text(), rf"rank 0 cannot serve the store at MASTER_ADDR:MASTER_PORT = {ADDRESSES[1]}:29883 .*of the host of rank 0")

    def test_the_rank_that_serves_the_store_names_itself_when_it_continues(self):
        runs = self.start("tcp", 29884)
        os.kill(runs[0].pids[0], signal.SIGSTOP)
        for survivor in range(1, RANKS):
            run = runs[survivor // RANKS_PER_HOST]
            pattern = rf"survivor {survivor} blames 0:"
            run.wait_for(lambda: run.when(pattern), TIMEOUT_MS / 1000 + 5, pattern)
        runs[0].wait_for(lambda: runs[0].when("rank 0 .* is stopped"), 2, "the launcher names it")
        runs[0].wait_for(lambda: not is_running(runs[0].pids[1]), 20, "the survivor of its host ends")
        runs[0].wait_for(lambda: runs[0].when("root cause; ending"), 2, "the launcher names it as the cause")
        os.kill(runs[0].pids[0], signal.SIGCONT)
        runs[0].wait_for(lambda: runs[0].when("survivor 0 blames"), 5, "rank 0 gives up")
        self.assertTrue(runs[0].when("survivor 0 blames 0:"), runs[0].text())
        self.assertEqual(runs[0].process.wait(15), 128 + signal.SIGSTOP)
        runs[0].reader.join(5)
        self.assertRegex(runs[0].text(), rf"root cause: rank 0 \(pid {runs[0].pids[0]}\) is stopped \(SIGSTOP\)")
        self.assertEqual(runs[1].process.wait(15), 3)
        self.began_elsewhere(runs[1], 0)

    def test_a_program_makes_many_worlds_one_after_the_other(self):
        runs = self.launch_both(29891, BUILD / "bin/fault_probe", "auto", TIMEOUT_MS, "worlds")
        self.finish(runs)
        for rank in range(RANKS):
            self.assertIn(f"rank {rank} made 100 worlds", runs[rank // RANKS_PER_HOST].text())
        for run in runs:
            self.assertNotIn("refused", run.text())

    def test_an_error_on_all_ranks(self):
        runs = self.launch_both(29885, BUILD / "bin/fault_probe", "auto", 20000, "agrees", "quiet")
        for run in runs:
            self.assertEqual(run.process.wait(60), 4, run.text())
        runs[0].reader.join(5)
        self.assertRegex(runs[0].text(), r"root cause: rank 1 \(pid \d+\) exited with code 4")
        self.began_elsewhere(runs[1], 1)

    def test_a_stop_on_another_host_is_no_failure(self):
        with tempfile.TemporaryDirectory() as folder:
            runs = self.launch_both(29886, BUILD / "bin/tessera-train", write_config(folder, 10**6), "train.log_every=1")
            runs[0].wait_for(lambda: runs[0].when(r"step +\d+"), 60, "the ranks train")
            runs[0].process.send_signal(signal.SIGTERM)
            for run in runs:
                self.assertEqual(run.process.wait(20), 128 + signal.SIGTERM, run.text())
                run.reader.join(5)
                self.assertNotRegex(run.text(), "root cause|first failure")
            self.assertIn("SIGTERM on another host stopped the program", runs[1].text())

    def train_with_own_folders(self, folder, port, *words, swapped=False):
        """Each host sees a folder of its own at `folder`/run: a mount that the other host does not have."""
        program = ["bash", "-c", 'echo pid $$ of rank $RANK; exec "$@"', "-", BUILD / "bin/tessera-train", folder / "c.yaml", "checkpoint.folder=" + str(folder / "run"),
                   "train.save=" + str(folder / "w.safetensors"), "train.log_every=1", *words]
        own = [folder / f"host-{1 - host if swapped else host}" for host in range(HOSTS)]
        for each in [*own, folder / "run"]:
            each.mkdir(exist_ok=True)
        mount = 'mount --bind "$1" "$2"; shift 2; exec "$@"'
        return [self.launch(host, port, *program, front=("unshare", "-m", "sh", "-c", mount, "-", own[host], folder / "run")) for host in range(HOSTS)]

    def finish(self, runs, code=0):
        for run in runs:
            self.assertEqual(run.process.wait(120), code, run.text())
            run.reader.join(5)

    def test_hosts_that_share_no_folder_resume_from_the_parts_of_both(self):
        for wrapper in ("DistributedDataParallel", "ZeroRedundancyOptimizer", "FullyShardedDataParallel"):
            with self.subTest(wrapper), tempfile.TemporaryDirectory() as name:
                folder = pathlib.Path(name)
                write_config(folder, 6)
                words = ["parallel.type=" + wrapper, "data.order=sequential", "checkpoint.every=1"]
                self.finish(self.train_with_own_folders(folder, 29887, *words))
                whole = (folder / "w.safetensors").read_bytes()
                written = [{file.name for file in (folder / f"host-{host}" / "step-00000006").iterdir()} for host in range(HOSTS)]
                self.assertIn("model-00004-of-00004.safetensors", written[1] - written[0])
                self.assertIn("model-00001-of-00004.safetensors", written[0] - written[1])
                self.assertEqual(list((folder / "run").iterdir()), [])
                for host in range(HOSTS):
                    for old in (folder / f"host-{host}").glob("step-*"):
                        shutil.rmtree(old)
                # A rank is killed as soon as a step is reported, which is while or after a checkpoint is written.
                for victim, step in ((3, 2), (0, 3), (2, 4)):
                    runs = self.train_with_own_folders(folder, 29888, *words)
                    near = runs[victim // RANKS_PER_HOST]
                    runs[0].wait_for_line(rf"checkpoint written to .*step-0000000{step}")
                    os.kill(near.pids[victim], signal.SIGKILL)
                    for run in runs:
                        self.assertNotEqual(run.process.wait(60), 0, run.text())
                # The hosts have changed places.
                runs = self.train_with_own_folders(folder, 29889, *words, swapped=True)
                self.finish(runs)
                self.assertRegex(runs[0].text(), "resuming from .*step-0000000[456]")
                self.assertIn("the hosts do not share", runs[0].text())
                self.assertEqual((folder / "w.safetensors").read_bytes(), whole)
                # The folder of a host is lost.
                shutil.rmtree(folder / "host-1")
                runs = self.train_with_own_folders(folder, 29890, *words)
                self.finish(runs, 2)
                self.assertRegex(runs[0].text() + runs[1].text(), r"no host of this group has the file \(rank \d on host \S+ wrote it\)")


def main():
    global WORLD
    if len(sys.argv) == 1:
        return run_each([BUILD], 2)
    try:
        WORLD = TwoHosts()
    except OSError as error:
        print(f"hosts_test: could not run: two network namespaces cannot be made here (needs root): {error}", file=sys.stderr)
        return SKIPPED
    try:
        return 0 if unittest.main(exit=False).result.wasSuccessful() else 1
    finally:
        WORLD.remove()


if __name__ == "__main__":
    sys.exit(main())
