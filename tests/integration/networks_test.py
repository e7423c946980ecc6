#!/usr/bin/env python3
"""Messages between hosts travel over the fastest network that reaches all of them. The hosts are two network namespaces with
several cables. Exits with 77 if namespaces cannot be made.

    networks_test.py BUILD_FOLDER
"""
import re, subprocess, sys, time, unittest

from faults_test import BUILD, Run
from two_hosts import ADDRESSES, TwoHosts, ip

SKIPPED = 77
FAST = ["198.51.100.1", "198.51.100.2"]  # TEST-NET-2
APART = ["203.0.113.1", "203.0.113.2"]  # TEST-NET-3
MEGABYTE = 1 << 20


def limit(name, cable):
    done = subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", cable, "root", "tbf", "rate", "200mbit", "burst", "256kb", "latency", "50ms"],
                          capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise OSError(f"tc: {done.stderr.strip()}")


class Networks(unittest.TestCase):
    def setUp(self):
        self.world = TwoHosts()
        self.addCleanup(self.world.remove)
        self.slow = self.world.cables
        for name, cable in zip(self.world.names, self.slow):
            limit(name, cable)

    def lay(self, cables, addresses, apart=False):
        """A further cable between the hosts, or one on each host that leads nowhere."""
        names = self.world.names
        if apart:
            for name, cable in zip(names, cables):
                ip("link", "add", cable, "netns", name, "type", "veth", "peer", "name", cable + "x", "netns", name)
                ip("-n", name, "link", "set", cable + "x", "up")
        else:
            ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, addresses):
            ip("-n", name, "address", "add", address + "/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")

    def sent(self, cable):
        """Bytes that host 0 has sent through it."""
        return int(subprocess.run(self.world.command(0, "cat", f"/sys/class/net/{cable}/statistics/tx_bytes"), capture_output=True, text=True, check=True, timeout=20).stdout)

    def train(self, port, environment=()):
        """Starts 2 ranks a host, and returns the log when they train."""
        runs = []
        for host in range(2):
            run = Run(*self.world.command(host, "env", "TESSERA_SECRET=shared by all hosts", *environment, BUILD / "bin/tessera", "run", "--nnodes", 2, "--node-rank", host, "-n", 2,
                                          "--master-addr", ADDRESSES[0], "--master-port", port, BUILD / "bin/fault_probe", "auto", 20000))
            self.addCleanup(run.close)
            runs.append(run)
        for run in runs:
            run.wait_for(lambda: len(run.pids) == 2 or run.process.poll() is not None, 60, "all ranks train")
            self.assertEqual(len(run.pids), 2, run.text())
        return runs[0].text()

    def while_it_trains(self, cables):
        """Bytes that host 0 sends through each while the ranks go on."""
        before = [self.sent(cable) for cable in cables]
        for _ in range(100):
            time.sleep(0.1)
            grown = [self.sent(cable) - was for cable, was in zip(cables, before)]
            if max(grown) > 4 * MEGABYTE:
                break
        return grown

    def test_the_fastest_network_that_reaches_all_hosts(self):
        self.lay(["tfast0", "tfast1"], FAST)
        self.lay(["tapart0", "tapart1"], [APART[0], APART[0]], apart=True)  # as hosts have a bridge of containers
        text = self.train(29892)
        self.assertEqual(len(re.findall("messages between hosts use", text)), 1, text)
        self.assertRegex(text, rf"messages between hosts use tfast0, 198\.51\.100\.0/24; measured 192\.0\.2\.0/24 \({self.slow[0]}\): [\d.]+ Gbit/s, 198\.51\.100\.0/24 \(tfast0\): "
                               r"[\d.]+ Gbit/s, 203\.0\.113\.0/24 \(tapart0\): does not reach all hosts")
        slow, fast = self.while_it_trains([self.slow[0], "tfast0"])
        self.assertGreater(fast, 4 * MEGABYTE)
        self.assertLess(slow, MEGABYTE)

    def test_a_network_that_loses_all_packets(self):
        self.lay(["tapart0", "tapart1"], APART, apart=True)
        start = time.monotonic()
        text = self.train(29896)
        self.assertLess(time.monotonic() - start, 30)
        self.assertRegex(text, rf"messages between hosts use {self.slow[0]}, 192\.0\.2\.0/24; measured .* 203\.0\.113\.0/24 \(tapart0\): does not reach all hosts")
        self.assertGreater(self.while_it_trains([self.slow[0]])[0], 4 * MEGABYTE)

    def test_the_users_interface_wins(self):
        self.lay(["tfast0", "tfast1"], FAST)
        text = self.train(29893, ["sh", "-c", 'GLOO_SOCKET_IFNAME=$(ls /sys/class/net | grep "^ts") exec "$@"', "-"])
        self.assertNotIn("messages between hosts use", text)
        slow, fast = self.while_it_trains([self.slow[0], "tfast0"])
        self.assertGreater(slow, 4 * MEGABYTE)
        self.assertLess(fast, MEGABYTE)

    def test_one_network_is_not_measured(self):
        text = self.train(29894)
        self.assertNotIn("messages between hosts use", text)

    def test_a_fast_network_of_one_host_alone(self):
        ip("link", "add", "tfast0", "netns", self.world.names[0], "type", "veth", "peer", "name", "tfastx", "netns", self.world.names[0])
        ip("-n", self.world.names[0], "address", "add", FAST[0] + "/24", "dev", "tfast0")
        for cable in ("tfast0", "tfastx"):
            ip("-n", self.world.names[0], "link", "set", cable, "up")
        text = self.train(29895)
        self.assertNotIn("messages between hosts use", text)
        self.assertGreater(self.while_it_trains([self.slow[0]])[0], 4 * MEGABYTE)


if __name__ == "__main__":
    try:
        tried = TwoHosts()
        try:
            limit(tried.names[0], tried.cables[0])
        finally:
            tried.remove()
    except OSError as error:
        print(f"networks: skipped: {error}")
        sys.exit(SKIPPED)
    unittest.main()
