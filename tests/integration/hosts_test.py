#!/usr/bin/env python3
"""A world on two hosts, which are two connected network namespaces with a launcher in each. Exits with 77 if namespaces cannot
be made.

    hosts_test.py BUILD_FOLDER
"""
import os, re, shutil, signal, subprocess, sys, unittest

from faults_test import BUILD, TIMEOUT_MS, Run

SKIPPED = 77
HOSTS, RANKS_PER_HOST = 2, 2
RANKS = HOSTS * RANKS_PER_HOST
ADDRESSES = ["192.0.2.1", "192.0.2.2"]  # TEST-NET-1
PREFIX = "tessera-hosts-"
NAMES = [f"{PREFIX}{os.getpid()}-{host}" for host in range(HOSTS)]


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def remove(name):
    """Removes the namespace with its cable, and kills the processes in it."""
    try:
        for pid in ip("netns", "pids", name).split():
            os.kill(int(pid), signal.SIGKILL)
        ip("netns", "del", name)
    except (OSError, ProcessLookupError):
        pass


def remove_left_over():
    """Removes the namespaces of earlier tests that were killed."""
    for line in ip("netns", "list").splitlines():
        found = re.match(rf"({PREFIX}(\d+)-\d)\b", line)
        if found and not os.path.exists(f"/proc/{found[2]}"):
            remove(found[1])


def make_hosts():
    cable = [f"ts{os.getpid()}-{host}" for host in range(HOSTS)]
    for name in NAMES:
        ip("netns", "add", name)
    ip("link", "add", cable[0], "netns", NAMES[0], "type", "veth", "peer", "name", cable[1], "netns", NAMES[1])
    for name, end, address in zip(NAMES, cable, ADDRESSES):
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "address", "add", address + "/24", "dev", end)
        ip("-n", name, "link", "set", end, "up")


class TwoHosts(unittest.TestCase):
    def start(self, backend, port):
        runs = []
        for host, name in enumerate(NAMES):
            runs.append(Run("ip", "netns", "exec", name, BUILD / "bin/tessera", "run", "--nnodes", HOSTS, "--node-rank", host, "-n", RANKS_PER_HOST,
                            "--master-addr", ADDRESSES[0], "--master-port", port, BUILD / "bin/fault_probe", backend, TIMEOUT_MS))
            self.addCleanup(runs[-1].close)
        for run in runs:
            run.wait_for(lambda: len(run.pids) == RANKS_PER_HOST or run.process.poll() is not None, 60, "all ranks train")
            self.assertEqual(len(run.pids), RANKS_PER_HOST, run.text())
        return runs

    def kill(self, victim, backend, port):
        runs = self.start(backend, port)
        for rank in range(RANKS):
            text = runs[rank // RANKS_PER_HOST].text()
            self.assertIn(f"rank {rank}: right sum of {RANKS} on gloo", text)
            self.assertIn(f"rank {rank}: local rank {rank % RANKS_PER_HOST} of {RANKS_PER_HOST}", text)
            self.assertIn(f"rank {rank}: right sum of {RANKS_PER_HOST} on {'gloo' if backend == 'gloo' else 'shm'}", text)
        os.kill(runs[victim // RANKS_PER_HOST].pids[victim], signal.SIGKILL)
        for survivor in set(range(RANKS)) - {victim}:
            run = runs[survivor // RANKS_PER_HOST]
            pattern = rf"survivor {survivor} blames {victim}:"
            run.wait_for(lambda: run.when(pattern), 5, pattern)
        for run in runs:
            self.assertNotEqual(run.process.wait(15), 0, run.text())
        near = runs[victim // RANKS_PER_HOST]
        self.assertTrue(near.when(rf"rank {victim} .*SIGKILL"), near.text())

    def test_gloo(self):
        self.kill(3, "gloo", 29871)

    def test_shared_memory_within_a_host(self):
        self.kill(2, "auto", 29872)

    def test_the_rank_that_serves_the_store(self):
        self.kill(0, "auto", 29873)


def make():
    """Makes both hosts. Raises OSError, and leaves nothing, if it cannot."""
    try:
        if not shutil.which("ip"):
            raise OSError("no ip command; it is in Debian's iproute2")
        remove_left_over()
        make_hosts()
    except OSError:
        remove_all()
        raise


def remove_all():
    for name in NAMES:
        remove(name)


def main():
    try:
        make()
    except OSError as error:
        print(f"hosts_test: could not run: two network namespaces cannot be made here (needs root): {error}", file=sys.stderr)
        return SKIPPED
    try:
        return 0 if unittest.main(exit=False).result.wasSuccessful() else 1
    finally:
        remove_all()


if __name__ == "__main__":
    sys.exit(main())
