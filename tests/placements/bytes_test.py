#!/usr/bin/env python3
"""The bytes of a training step that arrive at a host, counted at its network interface.

    bytes_test.py SOURCE_FOLDER BUILD_FOLDER

The hosts are network namespaces. Exits with 77 if these cannot be made.
"""
import os, pathlib, subprocess, sys, tempfile, unittest

SOURCE, BUILD = pathlib.Path(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1))
SKIPPED = 77
sys.path.insert(0, str(SOURCE / "tests/harness"))
from two_hosts import ADDRESSES, TwoHosts, ip

PORTS = iter(range(29950, 29999))
SHORT, LONG = 3, 9  # steps of two runs; their difference has neither start nor end
MODEL = ["model.n_embd=192", "train.global_batch=8", "data.val_fraction=0"]
SEGMENT = 1514  # bytes of a full TCP segment on Ethernet
# What arrives for each parameter: once in an all-reduce or a reduce-scatter and a gather between two
# hosts, half as much again with a second gather. Of int8 a block of 256 values and its scale.
ALL_REDUCE, FSDP, INT8 = 1.0, 1.5, (256 + 4) / 256 / 4
# No unit stays gathered from forward to backward.
EVERY_UNIT_TWICE = ["FullyShardedDataParallel", "parallel.wrap_policy.min_numel=20000", "parallel.resident_bytes=1"]


def resent(hosts):
    """Segments that host 1 has sent again. TCP resends when a busy machine acknowledges late."""
    command = hosts.command(1, "cat", "/proc/net/snmp")
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    names, counts = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
    return int(counts[names.index("RetransSegs")])


def arrived(hosts):
    """Bytes that host 0 has received. Without those that TCP sent twice: they tell about the machine."""
    lines = ip("-n", hosts.names[0], "-s", "link", "show", "dev", hosts.cables[0]).splitlines()
    received = int(lines[[i for i, line in enumerate(lines) if "RX:" in line][0] + 1].split()[0])
    return received - SEGMENT * resent(hosts)


def parameter_bytes(path):
    with open(path, "rb") as file:
        return os.path.getsize(path) - 8 - int.from_bytes(file.read(8), "little")


class Bytes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.hosts = TwoHosts()
        cls.addClassCleanup(cls.hosts.remove)

    def train(self, ranks, options, steps):
        """The bytes that arrived, and those of the model's parameters."""
        env = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "WORLD_SIZE", "RANK")}
        env.update(OMP_NUM_THREADS="1", TESSERA_SECRET="shared by all hosts")
        before, port, processes = arrived(self.hosts), next(PORTS), []
        with tempfile.TemporaryDirectory() as folder:
            model = pathlib.Path(folder) / "model.safetensors"
            try:
                for host in range(2):
                    command = [BUILD / "bin/tessera", "run", "--nnodes", 2, "--node-rank", host, "-n", ranks, "--master-addr", ADDRESSES[0],
                               "--master-port", port, BUILD / "bin/tessera-train", SOURCE / "configs/none.yaml", *MODEL, *options,
                               f"train.steps={steps}", f"train.save={model}"]
                    processes.append(subprocess.Popen(self.hosts.command(host, *command), env=env, text=True, stdin=subprocess.DEVNULL,
                                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
                outputs = [process.communicate(timeout=120)[0] for process in processes]
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            for process, output in zip(processes, outputs):
                self.assertEqual(process.returncode, 0, output)
            return arrived(self.hosts) - before, parameter_bytes(model)

    def expect(self, share, wrapper, *options, ranks_of_a_host=(1, 2)):
        for ranks in ranks_of_a_host:
            with self.subTest(wrapper=wrapper, options=options, ranks=ranks):
                options_here = [f"parallel.type={wrapper}", *options]
                short, parameters = self.train(ranks, options_here, SHORT)
                step = (self.train(ranks, options_here, LONG)[0] - short) / (LONG - SHORT)
                print(f"{wrapper} {' '.join(options)} 2x{ranks}: {step / parameters:.3f} P", flush=True)
                self.assertLessEqual(step, 1.03 * share * parameters)
                self.assertGreaterEqual(step, 0.95 * share * parameters)

    def test_ddp(self):
        # A given size, because the bytes of the probe that chooses one vary.
        self.expect(ALL_REDUCE, "DistributedDataParallel", "parallel.bucket_cap_mb=25")

    def test_zero(self):
        self.expect(ALL_REDUCE, "ZeroRedundancyOptimizer")

    def test_fsdp(self):
        self.expect(FSDP, *EVERY_UNIT_TWICE)

    def test_ddp_in_int8(self):
        self.expect(ALL_REDUCE * INT8, "DistributedDataParallel", "parallel.wire.gradients=int8", ranks_of_a_host=(2,))

    def test_zero_in_int8(self):
        self.expect(ALL_REDUCE * INT8, "ZeroRedundancyOptimizer", "parallel.wire.gradients=int8", "parallel.wire.parameters=int8", ranks_of_a_host=(2,))

    def test_fsdp_in_bfloat16(self):
        self.expect(FSDP / 2, *EVERY_UNIT_TWICE, "parallel.wire.gradients=bfloat16", "parallel.wire.parameters=bfloat16", ranks_of_a_host=(2,))


if __name__ == "__main__":
    try:
        TwoHosts().remove()
    except OSError as error:
        print(f"skipped: {error}")
        sys.exit(SKIPPED)
    unittest.main(verbosity=2)
