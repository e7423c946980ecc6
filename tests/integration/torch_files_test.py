#!/usr/bin/env python3
"""Files of torch.save between Python and Tessera, and files that must be refused. Needs the Python of
the PyTorch under test.

    torch_files_test.py BUILD_FOLDER
"""
import argparse, datetime, io, os, pathlib, pickle, random, struct, sys, tarfile, tempfile, unittest, zipfile
from collections import Counter, OrderedDict, defaultdict
from typing import Tuple

import numpy, torch

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from processes import Server

PROBE = Server(pathlib.Path(sys.argv.pop(1)).resolve() / "bin/torch_file_probe", {**os.environ, "OMP_NUM_THREADS": "1"})
KIB_ALLOWED = 100_000_000 // 1024
CPU_MS_ALLOWED = 2000  # sound files take 250 ms at most; a slow machine takes three times as long


def same(a, b):
    """Whether values are equal, tensors bit by bit."""
    if isinstance(a, torch.Tensor):
        def bits(tensor):
            return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return a.dtype == b.dtype and a.shape == b.shape and bits(a).equal(bits(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


def load(path):
    return torch.load(path, weights_only=True)


def load_state(path):
    """PyTorch 1.13 refuses floats with weights_only, also in its own files."""
    return torch.load(path) if torch.__version__.startswith("1.") else load(path)


class Tar:
    """A file as PyTorch 0.1 wrote it: members by name, which a test may change before save()."""

    class Pickler(pickle.Pickler):
        def __init__(self, file, tensors):
            super().__init__(file, protocol=2)
            self.tensors = tensors

        def persistent_id(self, value):
            if isinstance(value, torch.Tensor):
                self.tensors[id(value)] = value
                return str(id(value))

    def __init__(self, value):
        tensors, storages, pickled = {}, {}, io.BytesIO()
        self.Pickler(pickled, tensors).dump(value)
        self.members = {"sys_info": pickle.dumps({"protocol_version": 1000, "little_endian": True}, 2), "pickle": pickled.getvalue()}
        described = pickle.dumps(len(tensors), 2)
        for key, tensor in tensors.items():
            storage = tensor.storage()
            storages[storage.data_ptr()] = tensor.as_strided((storage.size(),), (1,), 0)
            described += self.entry(key, storage.data_ptr(), "Tensor")
            described += struct.pack(f"<{2 * tensor.dim() + 2}q", tensor.dim(), *tensor.shape, *tensor.stride(), tensor.storage_offset())
        self.members["tensors"] = described
        held = pickle.dumps(len(storages), 2)
        for key, elements in storages.items():
            kinds = {torch.float32: "Float", torch.float64: "Double", torch.int64: "Long", torch.uint8: "Byte"}
            held += self.entry(key, "cpu", kinds[elements.dtype] + "Storage")
            held += struct.pack("<q", len(elements)) + elements.numpy().tobytes()
        self.members["storages"] = held + pickle.dumps([], 2)

    @staticmethod
    def entry(key, second, name):
        """A pickle of Python 2, whose integers beyond 32 bits are texts."""
        def item(value):
            return b"I%d\n" % value if isinstance(value, int) else b"U" + bytes([len(value)]) + value.encode()
        return b"\x80\x02(" + item(key) + item(second) + b"ctorch\n" + name.encode() + b"\nt."

    def save(self, path):
        with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as tar:
            for name, data in self.members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def probe(self, *words):
        return PROBE.call("torch_file_probe", *words, cwd=self.folder)

    def path(self, name):
        return self.folder / name


class Own:
    pass


class RoundTrip(Folder):
    def weights(self, value, *key, **options):
        torch.save(value, self.path("in.pt"), **options)
        done = self.probe("weights", self.path("in.pt"), self.path("out.pt"), *key)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.logged = done.stdout
        return load(self.path("out.pt"))

    def test_every_dtype(self):
        names = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
                 "bool", "complex64", "complex128"]
        newer = ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"] if hasattr(torch, "uint16") else []
        if not self.probe("libtorch").stdout.startswith("1."):
            names += [*newer, "complex32"] if newer else []
        else:  # older than Python's PyTorch
            for name in newer:
                torch.save({"a": torch.ones(2).to(getattr(torch, name))}, self.path("in.pt"))
                done = self.probe("weights", self.path("in.pt"), self.path("out.pt"))
                self.assertIn(f"has dtype torch.{name}, which this libtorch (1.", done.stderr)
        state = OrderedDict((n, torch.arange(6.0).reshape(2, 3).to(getattr(torch, n))) for n in names)
        out = self.weights(state)
        self.assertEqual(list(out), names)
        for name in names:
            self.assertTrue(same(state[name].view(torch.uint8) if "float8" in name else state[name],
                                 out[name].view(torch.uint8) if "float8" in name else out[name]), name)

    def test_strides_shared_storages_and_parameters(self):
        base = torch.arange(24.0)
        state = {"t": base.view(4, 6).t(), "row": base.view(4, 6)[2], "column": base.view(4, 6)[:, 1],
                 "all": base, "again": base, "repeated": torch.ones(1).expand(5), "empty": torch.ones(0, 3),
                 "scalar": torch.tensor(float("nan")), "last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
                 "parameter": torch.nn.Parameter(torch.randn(3))}
        self.assertTrue(same({k: v.detach().contiguous() for k, v in state.items()}, dict(self.weights(state))))

    def test_a_module_with_buffers(self):
        state = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)).state_dict()
        self.assertTrue(same(dict(state), dict(self.weights(state))))

    def test_the_dict_with_the_weights_is_found_or_named(self):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "seed": 2**70}
        self.assertTrue(same(dict(model.state_dict()), dict(self.weights(whole))))
        whole = {"a": {"net": model.state_dict()}, "b": model.state_dict()}
        self.assertTrue(same(dict(model.state_dict()), dict(self.weights(whole, "a/net"))))
        done = self.probe("weights", self.path("in.pt"), self.path("out.pt"))
        self.assertIn('several dicts of tensors; name the one with the weights: its dicts are "a", "b"', done.stderr)
        done = self.probe("weights", self.path("in.pt"), self.path("out.pt"), "c")
        self.assertIn('no dict at "c"', done.stderr)

    def test_every_protocol(self):
        for protocol in (2, 3, 4, 5):
            torch.save({"a": torch.ones(3)}, self.path("p.pt"), pickle_protocol=protocol)
            done = self.probe("weights", self.path("p.pt"), self.path("out.pt"))
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_objects_of_python_beside_the_weights_are_left_out_and_named(self):
        model = torch.nn.Linear(3, 2).state_dict()
        own = Own()
        own.self = own
        numpy_core = type(numpy.float64(0)).__reduce__(numpy.float64(0))[0].__module__
        beside = {"best": numpy.float64(0.5), "array": numpy.arange(3), "args": argparse.Namespace(lr=0.1, file=pathlib.Path("x")),
                  "seen": {1, 2}, "frozen": frozenset([3]), "path": pathlib.Path("x"), "when": datetime.datetime(2020, 1, 1),
                  "device": torch.device("cpu"), "own": own, "count": Counter("aab"), "default": defaultdict(list, a=[1]),
                  "type": torch.optim.SGD, "bytes": bytearray(b"x"), "complex": 1j}
        names = [f"{numpy_core}.scalar", "argparse.Namespace", ".PosixPath", "set", "datetime.datetime", ".Own", "torch.device",
                 "torch.optim.sgd.SGD", "collections.Counter", "complex"]
        for protocol in (2, 3, 4, 5):
            for zipped in (True, False):
                options = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": zipped}
                for whole, key in (({"model": model, "net": torch.nn.Linear(2, 2), **beside}, []), ({"a": beside, "b": {"c": model}}, ["b/c"])):
                    self.assertTrue(same(dict(model), dict(self.weights(whole, *key, **options))))
                for name, value in beside.items():
                    self.assertTrue(same(dict(model), dict(self.weights({name: value, **model}, **options))))
                for name, value in zip(names, (beside[k] for k in ("best", "args", "path", "seen", "when", "own", "device", "type", "count", "complex"))):
                    self.weights({"model": model, "x": value}, **options)
                    self.assertRegex(self.logged, rf'in.pt: leaves out values of .*{name}"')
        self.weights(model)
        self.assertEqual(self.logged, "")

    def test_parameters_with_attributes(self):
        parameter = torch.nn.Parameter(torch.randn(3))
        parameter.own = 1
        self.assertTrue(same({"a": parameter.detach()}, dict(self.weights({"a": parameter}))))

    def test_files_of_many_tensors(self):
        """100,000 names of 100 bytes, and the state of an optimizer for 10,000 parameters."""
        one = torch.ones(2)
        names = {f"model.layers.{i:06d}.{'x' * 75}.bias": one for i in range(100_000)}
        state = {i: {"step": one, "exp_avg": one, "exp_avg_sq": one} for i in range(10_000)}
        for value, key in ((names, []), ({"state": state, "param_groups": [{"params": list(state)}]}, ["state"])):
            torch.save(value, self.path("in.pt"))
            done = self.probe("weights", self.path("in.pt"), self.path("out.pt"), *key)
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_form_before_pytorch_1_6(self):
        base = torch.arange(24.0)
        state = {"t": base.view(4, 6).t(), "row": base.view(4, 6)[2], "all": base, "empty": torch.ones(0, 3), "half": torch.ones(3).half(),
                 "long": torch.arange(5), "bool": torch.tensor([True, False]), "parameter": torch.nn.Parameter(torch.randn(3))}
        for protocol in (2, 4):
            out = self.weights(state, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
            self.assertTrue(same({k: v.detach().contiguous() for k, v in state.items()}, dict(out)))
        optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)
        torch.save(optimizer.state_dict(), self.path("in.pt"), _use_new_zipfile_serialization=False)
        done = self.probe("state", self.path("in.pt"), self.path("out.pt"), "weight", "bias")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_tar_form_of_pytorch_0_1(self):
        base = torch.arange(24.0)
        state = OrderedDict([("t", base.view(4, 6).t()), ("row", base.view(4, 6)[2]), ("again", base), ("all", base), ("scalar", base[3]),
                             ("long", torch.arange(5)), ("byte", torch.ones(3, dtype=torch.uint8)), ("double", torch.ones(2, 1, 2).double())])
        Tar({"epoch": 3, "state_dict": state}).save(self.path("in.tar"))
        newer = {} if torch.__version__.startswith("1.") else {"weights_only": False}
        self.assertTrue(same(torch.load(self.path("in.tar"), **newer)["state_dict"], state))  # the test writes that form
        for key in ([], ["state_dict"]):
            done = self.probe("weights", self.path("in.tar"), self.path("out.pt"), *key)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(same({k: v.contiguous() for k, v in state.items()}, dict(load(self.path("out.pt")))))

    def test_states_of_optimizers(self):
        for make in (lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True), lambda p: torch.optim.Adam(p),
                     lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
                     lambda p: torch.optim.SGD(p, lr=0.1),
                     lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True)):
            model = torch.nn.Linear(3, 2)
            optimizer = make(model.parameters())
            for _ in range(3):
                model(torch.randn(4, 3)).sum().backward()
                optimizer.step()
            torch.save(optimizer.state_dict(), self.path("in.pt"))
            done = self.probe("state", self.path("in.pt"), self.path("out.pt"), "weight", "bias")
            self.assertEqual(done.returncode, 0, done.stderr)
            out, before = load_state(self.path("out.pt")), optimizer.state_dict()
            other = make(torch.nn.Linear(3, 2).parameters())
            other.load_state_dict(out)
            after = other.state_dict()
            for number, state in before["state"].items():
                given = {k: v for k, v in state.items() if v is not None}
                written = {k: v for k, v in after["state"].get(number, {}).items()}
                self.assertEqual(sorted(given), sorted(written))
                self.assertTrue(all(same(given[k], written[k]) for k in given), type(optimizer))
            for key, value in before["param_groups"][0].items():
                self.assertEqual(after["param_groups"][0][key] or False, value or False, key)

    def test_states_go_by_the_numbers_of_the_parameters(self):
        """Python counts from 0, in the order of the groups. A file may have other numbers."""
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        dict_ = optimizer.state_dict()
        before = dict_["state"]
        torch.save({"state": {1: before[0], 0: before[1]}, "param_groups": [dict(dict_["param_groups"][0], params=[1, 0])]}, self.path("in.pt"))
        done = self.probe("state", self.path("in.pt"), self.path("out.pt"), "weight", "bias")
        self.assertEqual(done.returncode, 0, done.stderr)
        out = load_state(self.path("out.pt"))["state"]
        self.assertTrue(all(same(before[i]["exp_avg"], out[i]["exp_avg"]) for i in (0, 1)))

    def test_a_training_goes_from_python_to_cpp_and_back(self):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(of, by):
            for parameter in of.parameters():
                parameter.grad = torch.ones_like(parameter)
            by.step()

        for _ in range(3):
            step(model, optimizer)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, self.path("in.pt"))
        done = self.probe("train", self.path("in.pt"), self.path("in.pt"), self.path("w.pt"), self.path("s.pt"))
        self.assertEqual(done.returncode, 0, done.stderr)
        back = torch.nn.Linear(3, 2)
        back.load_state_dict(load(self.path("w.pt")))
        continued = torch.optim.AdamW(back.parameters(), lr=0.5)
        continued.load_state_dict(load_state(self.path("s.pt")))
        self.assertEqual(continued.param_groups[0]["lr"], 1e-2)
        self.assertEqual(continued.state_dict()["state"][0]["step"], 4)
        step(model, optimizer)
        for one, two in zip(model.parameters(), back.parameters()):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
        # The state that was written is, bit by bit, what is read again.
        done = self.probe("state", self.path("s.pt"), self.path("s2.pt"), "weight", "bias")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(same(load_state(self.path("s.pt")), load_state(self.path("s2.pt"))))

    def test_an_option_that_changes_the_update_is_refused(self):
        optimizer = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters(), maximize=True)
        torch.save(optimizer.state_dict(), self.path("in.pt"))
        done = self.probe("state", self.path("in.pt"), self.path("out.pt"), "weight", "bias")
        self.assertIn('the option "maximize" is set', done.stderr)
        optimizer = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
        torch.save(optimizer.state_dict(), self.path("in.pt"))
        done = self.probe("state", self.path("in.pt"), self.path("out.pt"), "weight")
        self.assertIn("it has 2 parameters, given are the names of 1", done.stderr)


class OwnCode:
    def __reduce__(self):
        return os.system, ("touch was_run",)


def storage(key=b"0", kind=b"FloatStorage", numel=2):
    """A persistent id, as torch.save writes it."""
    return (b"(X\x07\x00\x00\x00storagectorch\n" + kind + b"\nX" + struct.pack("<I", len(key)) + key
            + b"X\x03\x00\x00\x00cpuJ" + struct.pack("<i", numel) + b"tQ")


def tensor(shape, strides, offset=0, numel=2):
    def numbers(values):
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", v) for v in values) + b"t"
    return (b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(numel=numel) + b"J" + struct.pack("<i", offset)
            + numbers(shape) + numbers(strides) + b"\x89ccollections\nOrderedDict\n)RtR")


class Script(torch.nn.Module):
    """Writes a file when it is loaded."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path
        self.weight = torch.nn.Parameter(torch.ones(2))

    @torch.jit.export
    def __getstate__(self) -> Tuple[str, torch.Tensor, bool]:
        return (self.path, self.weight, self.training)

    @torch.jit.export
    def __setstate__(self, state: Tuple[str, torch.Tensor, bool]):
        self.path = state[0]
        self.weight = state[1]
        self.training = state[2]
        torch.save(torch.ones(1), state[0])

    def forward(self, x):
        return x * self.weight


class Hostile(Folder):
    """One process opens all files of a test, and measures each."""

    def setUp(self):
        super().setUp()
        self.cases = []

    def archive(self, pickled, records=(("archive/data/0", b"12345678"),), compression=zipfile.ZIP_STORED):
        path = self.path(f"x{len(self.cases)}.pt")
        with zipfile.ZipFile(path, "w", compression, compresslevel=1) as z:
            z.writestr("archive/data.pkl", pickled)
            for name, data in records:
                z.writestr(name, data)
            z.writestr("archive/version", b"3\n")
        return path

    def refused(self, path, words):
        self.cases.append((path, words))

    def tearDown(self):
        done = self.probe("open", *(path for path, _ in self.cases))
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [line for line in done.stdout.splitlines() if "] tessera: torch file: " not in line]  # the log
        self.assertEqual(len(lines), len(self.cases), done.stderr)
        for line, (path, words) in zip(lines, self.cases):
            kib, ms, text = line.split(" ", 2)
            self.assertIn(words, text)
            self.assertLess(int(kib), KIB_ALLOWED, text)
            self.assertLess(float(ms), CPU_MS_ALLOWED, "CPU time: " + text)
        self.assertFalse(self.path("was_run").exists())

    def dict_of(self, value):
        return b"\x80\x02}X\x01\x00\x00\x00a" + value + b"s."

    def test_the_harness_writes_sound_files(self):
        path = self.archive(self.dict_of(tensor([2], [1])))
        done = self.probe("open", path)
        self.assertIn(" read", done.stdout)

    def test_the_probe_sees_memory_and_cpu_time(self):
        kib, ms, _ = self.probe("measure").stdout.split(" ", 2)
        self.assertGreater(int(kib), 60_000)
        self.assertGreaterEqual(float(ms), 100)

    def test_code(self):
        torch.save({"a": OwnCode()}, self.path("x.pt"))
        self.refused(self.path("x.pt"), "system")
        for module, name in (("builtins", "eval"), ("builtins", "__import__"), ("torch", "load"), ("torch._utils", "os")):
            self.refused(self.archive(b"\x80\x02c%s\n%s\n)R." % (module.encode(), name.encode())), f"{module}.{name}")
        self.refused(self.archive(self.dict_of(b"cos\nsystem\n")), "os.system")  # not even called
        self.refused(self.archive(pickle.dumps({"a": complex(1, 2)}, protocol=4)), "builtins.complex")

    def test_zip_bombs(self):
        self.refused(self.archive(b"\0" * 200_000_000, compression=zipfile.ZIP_DEFLATED), 'its record "data.pkl" is compressed')
        self.refused(self.archive(b"\0" * 20_000_000), "expected at most 16777216")
        sound = self.dict_of(tensor([25_000_000], [1], numel=25_000_000))
        self.refused(self.archive(sound, [("archive/data/0", b"\0" * 100_000_000)], zipfile.ZIP_DEFLATED), "compressed")

    def test_a_bomb_that_lies_about_its_size(self):
        """The directory and the record's own header claim 1000 bytes; the data inflates to 200 MB."""
        path = self.archive(b"\0" * 200_000_000, compression=zipfile.ZIP_DEFLATED)
        data = bytearray(path.read_bytes())
        for place in (data.index(b"PK\x03\x04") + 22, data.index(b"PK\x01\x02") + 24):
            self.assertEqual(struct.unpack_from("<I", data, place)[0], 200_000_000)
            struct.pack_into("<I", data, place, 1000)
        path.write_bytes(data)
        self.refused(path, "is compressed")

    def test_a_damaged_pickle(self):
        torch.save({"abc": torch.ones(2, 3)}, self.path("x.pt"))
        data = bytearray(self.path("x.pt").read_bytes())
        data[data.index(b"abc")] = ord("z")
        self.path("x.pt").write_bytes(data)
        self.refused(self.path("x.pt"), 'its record "data.pkl" has the checksum')

    def test_overlapping_records(self):
        path = self.archive(self.dict_of(tensor([2], [1])), [("archive/data/0", b"12345678"), ("archive/data/1", b"12345678")])
        data = bytearray(path.read_bytes())
        first = data.index(b"PK\x01\x02")
        headers = []
        while data[first:first + 4] == b"PK\x01\x02":
            headers.append(first)
            first += 46 + sum(struct.unpack_from("<HHH", data, first + 28))
        data[headers[2] + 42:headers[2] + 46] = data[headers[1] + 42:headers[1] + 46]
        path.write_bytes(data)
        self.refused(path, "overlaps")

    def test_a_size_beyond_the_file(self):
        path = self.archive(self.dict_of(tensor([2], [1])))
        data = bytearray(path.read_bytes())
        entry = data.index(b"archive/data/0", data.index(b"PK\x01\x02")) - 46
        struct.pack_into("<II", data, entry + 20, 4_000_000_000, 4_000_000_000)
        path.write_bytes(data)
        self.refused(path, "not within the file")

    def test_cycles_and_nesting(self):
        self.refused(self.archive(b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s."), "in a cycle")
        self.refused(self.archive(self.dict_of(b"]q\x01h\x01a")), "in a cycle")
        self.refused(self.archive(b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b"."), "take more than")
        self.refused(self.archive(self.dict_of(b"]" * 100_000 + b"a" * 99_999)), "deeper than 32")

    def test_shared_values_without_end(self):
        """Each list has the one before it twice: 2^40 visits without a bound."""
        doubled = b"]q\x00" + b"".join(b"0](h%ch%ceq%c" % (i, i, i + 1) for i in range(30))
        self.refused(self.archive(self.dict_of(doubled)), "more than 2000000 values")

    def test_names_without_end(self):
        """A shared tensor under a long key: 18 kB of 1,000 x 1,000 names, and a long list of names."""
        def text(data):
            return b"X" + struct.pack("<I", len(data)) + data

        def numbered(count, value):
            return b"(" + b"".join(b"J" + struct.pack("<i", i) + value for i in range(count)) + b"d"
        begin = b"\x80\x02}X\x01\x00\x00\x00z" + tensor([2], [1]) + b"q\x00s"
        product = text(b"y" * 3900) + numbered(1000, b"h\x00") + b"q\x01s" + text(b"w" * 3900) + numbered(1000, b"h\x01") + b"s."
        self.refused(self.archive(begin + product), "has names of more than ")
        self.refused(self.archive(begin + text(b"y" * 3900) + numbered(60_000, b"h\x00") + b"s."), "has names of more than ")
        self.refused(self.archive(begin + text(b"y" * 5000) + numbered(2, b"h\x00") + b"s."), "a name of more than 4096 bytes")
        self.refused(self.archive(begin + text(b"y") + numbered(200_000, b"h\x00") + b"s."), "more than 200000 tensors")

    def test_values_that_are_looked_at_again_and_again(self):
        dict_ = b"(K\x00" + tensor([2], [1]) + b"K\x01K\x01" * 300_000 + b"d"
        uses = b"".join(b"J" + struct.pack("<i", i) + b"h\x07" for i in range(100_000))
        self.refused(self.archive(b"\x80\x02" + dict_ + b"q\x070(" + uses + b"d."), "more than 2000000 values")
        plain = tensor([2], [1])
        self.refused(self.archive(self.dict_of(plain[:-2] + dict_ + b"tR")), "more metadata than")
        long_key = plain.replace(b"X\x01\x00\x00\x000", b"X" + struct.pack("<I", 1000) + b"0" * 1000)
        self.refused(self.archive(self.dict_of(long_key)), "a storage with a key of 1000 bytes")

    def test_torchscript_is_refused_and_never_runs(self):
        run = self.path("was_run")
        module = torch.jit.script(Script(str(run)))
        for name in ("script.pt", "model.safetensors"):
            module.save(str(self.path(name)))
            torch.jit.load(str(self.path(name)))
            self.assertTrue(run.exists(), "libtorch runs it")
            run.unlink()
            self.refused(self.path(name), f'{self.path(name)}: is a TorchScript archive with the class "__torch__.')
        # A class of the name that C++'s torch::save() writes: its code does not count, its attributes do.
        with zipfile.ZipFile(self.path("script.pt")) as script:
            records = [(r, script.read(r)) for r in script.namelist() if "data.pkl" not in r]
        pickled = b"\x80\x02c__torch__\nModule\n)\x81" + self.dict_of(tensor([2], [1]))[2:-1] + b"b."
        path = self.archive(pickled, [("archive/data/0", b"12345678"), ("archive/constants.pkl", b"\x80\x02).")]
                            + [("archive" + r[r.index("/"):], data) for r, data in records if "/code/" in r])
        self.refused(path, "read")
        for state in (b"(K\x01K\x02t", b"]"):
            path = self.archive(b"\x80\x02c__torch__\nModule\n)\x81" + state + b"b.", [("archive/constants.pkl", b"\x80\x02).")])
            self.refused(path, 'is a TorchScript archive with the class "__torch__.Module"')

    def test_tensors_in_objects_that_are_not_read(self):
        for value, name in ((torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"), ({"b": [torch.ones(2).to_sparse()]}, "torch._utils._rebuild_sparse_tensor"),
                            (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "torch._utils._rebuild_qtensor"),
                            (Counter({"x": torch.ones(2)}), "collections.Counter")):
            path = self.path(f"{name}.pt")
            torch.save({"a": value, "w": torch.ones(2)}, path)
            self.refused(path, f'is a "{name}" of Python with tensors, which Tessera does not read')
        torch.save(torch.nn.Linear(2, 2), self.path("model.pt"))
        self.refused(self.path("model.pt"), 'holds a "torch.nn.modules.linear.Linear" of Python; expected a dict of tensors')

    def test_damaged_files_of_the_form_before_pytorch_1_6(self):
        torch.save({"a": torch.ones(2, 3), "b": torch.ones(2)}, self.path("old.pt"), _use_new_zipfile_serialization=False)
        data = self.path("old.pt").read_bytes()
        for number, end in enumerate((30, 60, 200, len(data) - 45, len(data) - 1)):
            self.path(f"cut{number}.pt").write_bytes(data[:end])
            self.refused(self.path(f"cut{number}.pt"), "no sound ")

        def refused(words, little=b"\x88", keys=b"\x80\x02](X\x01\x00\x00\x000e.", data=struct.pack("<q", 2) + b"12345678",
                    pickled=self.dict_of(tensor([2], [1]))):
            path = self.path(f"old{len(self.cases)}.pt")
            path.write_bytes(pickle.dumps(0x1950a86a20f9469cfc6c, 2) + pickle.dumps(1001, 2) + b"\x80\x02}X\x0d\x00\x00\x00little_endian"
                             + little + b"s." + pickled + keys + data)
            self.refused(path, words)
        refused("read")
        refused("not of a little-endian machine", little=b"\x89")
        refused("no list of at most 200000 storages", keys=b"\x80\x02N.")
        refused("no list of at most 200000 storages", keys=b"\x80\x02](" + b"K\x01" * 200_001 + b"e.")
        refused("a key that its values do not use", keys=b"\x80\x02](X\x01\x00\x00\x00?e.")
        refused("a storage leaves the file", data=struct.pack("<q", 2**62) + b"12345678")
        refused("its storage has 4 bytes; expected 8", data=struct.pack("<q", 1) + b"12345678")
        refused("it ends too early", data=b"")
        refused('the archive has no record "data/0"', keys=b"\x80\x02].")
        refused("a view of a storage", pickled=self.dict_of(tensor([2], [1]).replace(b"\x02\x00\x00\x00tQ", b"\x02\x00\x00\x00K\x01tQ")))

    def test_damaged_files_of_the_tar_form(self):
        a = torch.ones(2)
        number, storage = id(a), a.storage().data_ptr()
        views = pickle.dumps([], 2)

        def refused(words, value=None, **members):
            tar = Tar({"a": a} if value is None else value)
            for name, data in members.items():
                if data is None: del tar.members[name]
                else: tar.members[name] = data
            path = self.path(f"{len(self.cases)}.tar")
            tar.save(path)
            self.refused(path, words)
            return path

        def described(*numbers, key=number, held=storage, count=1):
            return pickle.dumps(count, 2) + Tar.entry(key, held, "FloatTensor") + struct.pack(f"<{len(numbers)}q", *numbers)

        def stored(elements, kind="FloatStorage", data=b"12345678", count=1):
            return pickle.dumps(count, 2) + Tar.entry(storage, "cpu", kind) + struct.pack("<q", elements) + data + views

        whole = refused("read").read_bytes()
        refused("read", tensors=described((5 << 32) + 1, 2, 1, 0))
        for end in range(512, len(whole.rstrip(b"\0")), 512):
            self.path(f"cut{end}.tar").write_bytes(whole[:end])
            self.refused(self.path(f"cut{end}.tar"), f"torch file: {self.path(f'cut{end}.tar')}: ")
        for name in ("sys_info", "pickle", "tensors", "storages"):
            refused(f"is a tar archive without a member {name}, which PyTorch 0.1 writes", **{name: None})
            refused("it ends too early", **{name: b""})
            refused("no sound pickle", **{name: b"\xff"})
        refused("not of a little-endian machine", sys_info=pickle.dumps({"little_endian": False}, 2))
        refused("system", value={"a": OwnCode()})
        refused("a value is none of its tensors", tensors=described(1, 2, 1, 0, key=number + 1))
        refused("a value is none of its tensors", tensors=pickle.dumps(0, 2))
        refused("a tensor has a storage that is not there", tensors=described(1, 2, 1, 0, held=storage + 1))
        refused("more than 64 dimensions", tensors=described(65, *[1] * 131))
        refused("more than 64 dimensions", tensors=described(-1, 2, 1, 0))
        refused("leave its storage of 2 elements", tensors=described(1, 3, 1, 0))
        refused("leave its storage of 2 elements", tensors=described(1, 2, 1, 1))
        refused("not a number from 0", tensors=described(1, 2, -1, 0))
        refused("negative", tensors=described(1, 2, 1, -1))
        refused("it ends too early", tensors=described(2, 2, 1, 0))
        refused("is no sound pickle", tensors=described(1, 2, 1, 0, count=2))
        refused("read", tensors=described(1, 2, 1, 0, count=20_000) + 19_999 * described(64, *[1] * 129)[len(pickle.dumps(1, 2)):])
        for count in (-1, 20_001, 2**40, "1"):
            refused("no number of tensors or storages of at most 20000", tensors=pickle.dumps(count, 2))
            refused("no number of tensors or storages of at most 20000", storages=pickle.dumps(count, 2))
        refused("other values than PyTorch writes", tensors=pickle.dumps(1, 2) + pickle.dumps((number, "a", "b"), 2))
        refused("other values than PyTorch writes", storages=pickle.dumps(1, 2) + pickle.dumps([storage, "a", "b"], 2))
        refused("a storage leaves the file", storages=stored(2**62))
        refused("a storage leaves the file", storages=stored(-1))
        refused("a dtype that Tessera does not read", storages=stored(2, "NoStorage"))
        refused("a dtype that Tessera does not read", storages=stored(2, "load"))
        refused("an integer has other digits", storages=stored(2).replace(b"I%d\n" % storage, b"I12x\n"))
        for size in (b"7" * 11, b"-0000000001", b"x" * 11):
            broken = bytearray(whole)
            broken[124:135] = size
            path = self.path(f"size{len(self.cases)}.tar")
            path.write_bytes(broken)
            self.refused(path, "a member of the archive leaves it")
        # Elsewhere a persistent id is no text.
        self.refused(self.archive(self.dict_of(b"U\x01aQ")), "a persistent id is no tuple")

    def test_mutated_files_of_the_tar_form_are_read_or_refused(self):
        draw = random.Random(1)
        Tar({"a": torch.ones(2, 3), "b": torch.ones(2).long()}).save(self.path("sound.tar"))
        sound = self.path("sound.tar").read_bytes().rstrip(b"\0")
        for i in range(400):
            data = bytearray(sound)
            for _ in range(draw.randint(1, 4)):
                at = draw.choice([k for k in range(512, len(data)) if data[k]])
                data[at] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
            path = self.path(f"mutated{i}.tar")
            path.write_bytes(data)
            self.refused(path, "")

    def test_many_values(self):
        self.refused(self.archive(b"\x80\x02" + b")" * 10_000_000 + b"."), "take more than")
        self.refused(self.archive(b"\x80\x02(" + b"K\x01" * 8_000_000 + b"t."), "take more than")

    def test_shapes_beyond_the_storage(self):
        billion = 10**9
        self.refused(self.archive(self.dict_of(tensor([billion], [1]))), "leave its storage of 2 elements")
        self.refused(self.archive(self.dict_of(tensor([billion], [0]))), "repeat the 2 of its storage")
        self.refused(self.archive(self.dict_of(tensor([2**62, 8], [1, 1]))), "leave its storage")
        self.refused(self.archive(self.dict_of(tensor([2], [2**62]))), "leave its storage")
        self.refused(self.archive(self.dict_of(tensor([2**62, 2**62, 0], [1, 1, 1]))), "which overflows")
        self.refused(self.archive(self.dict_of(tensor([2], [-1]))), "not a number from 0")
        self.refused(self.archive(self.dict_of(tensor([1], [1], offset=-1))), "negative")
        self.refused(self.archive(self.dict_of(tensor([2], [1], numel=4))), "expected 16")
        self.refused(self.archive(self.dict_of(tensor([2], [1])), []), 'no record "data/0"')

    def test_other_kinds_are_named(self):
        self.refused(self.archive(self.dict_of(tensor([2], [1])), [("archive/data/0", b"12345678"), ("archive/byteorder", b"big")]), "big")
        self.refused(self.archive(b"\x80\x02K\x01."), "holds a integer")
        (self.path("not.pt")).write_bytes(b"hello" * 100)
        self.refused(self.path("not.pt"), "is of an unknown kind")
        whole = self.archive(self.dict_of(tensor([2], [1])), [("archive/data/0", b"12345678")]).read_bytes()
        self.path("cut.pt").write_bytes(whole[:-30])
        self.refused(self.path("cut.pt"), "may be cut off")

    def test_a_memo_that_is_set_again(self):
        """The later value counts: here the list in which a list is, so that there is a cycle."""
        self.refused(self.archive(self.dict_of(b"K\x01q\x05" + b"0" + b"]q\x05h\x05a")), "in a cycle")

    def test_a_tensor_that_is_conjugate(self):
        plain = tensor([2], [1])
        self.assertTrue(plain.endswith(b"tR"))
        self.refused(self.archive(self.dict_of(plain[:-2] + b"}X\x04\x00\x00\x00conj\x88stR")), "conjugate or negative bit")

    def test_stack_errors(self):
        for text in (b"\x80\x02", b"\x80\x02.", b"\x80\x02t.", b"\x80\x020.", b"\x80\x02h\x05.", b"\x80\x02}}.", b"\x80\x02(}.",
                     b"\x80\x02}(K\x01u.", b"\x80\x02K\x01K\x02a.", b"\x80\x02X\xff\xff\xff\xffa.", b"\x80\x02\x8d" + b"\xff" * 8 + b".",
                     b"\x80\x02Q.", b"\x80\x02R.", b"\x80\x02(tQ.", b"\x80\x01N.", b"\x80\x02cos", b"\xfe"):
            self.refused(self.archive(text), "no sound pickle")


if __name__ == "__main__":
    unittest.main()
