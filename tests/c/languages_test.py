#!/usr/bin/env python3
"""The C interface from C, from Python's ctypes and from Fortran: languages_test.py BUILD_FOLDER."""
import os, pathlib, re, shutil, subprocess, sys, tempfile, textwrap, unittest

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK")} | {
    "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LOSS = re.compile(r"loss +([\d.Ee+-]+)")

# Everything that a binding needs: ctypes, and arrays in memory.
BINDING = textwrap.dedent("""
    import ctypes, math, shutil, sys
    lib = ctypes.CDLL(sys.argv[1])
    lib.tessera_last_error.restype = ctypes.c_char_p
    class Array(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("dims", ctypes.c_int32),
                    ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64))]
    class Step(ctypes.Structure):
        _fields_ = [("step", ctypes.c_int64), ("samples", ctypes.c_int64), ("loss", ctypes.c_double),
                    ("grad_norm", ctypes.c_double), ("lr", ctypes.c_double), ("updated", ctypes.c_int32), ("stopped", ctypes.c_int32)]
    def check(code):
        if code:
            raise RuntimeError(lib.tessera_last_error().decode())
    def array(values, width):
        rows = len(values) // width
        data = (ctypes.c_double * max(len(values), 1))(*values)
        made = Array(ctypes.addressof(data), 1, 2, (ctypes.c_int64 * 2)(rows, width), None)
        made.keep = data
        return made
    group, session, rank, done = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(), Step()
    check(lib.tessera_group_from_environment(ctypes.byref(group)))
    check(lib.tessera_group_rank(group, ctypes.byref(rank)))
    size = ctypes.c_int()
    check(lib.tessera_group_size(group, ctypes.byref(size)))
    config = b"{model: {type: MLP, inputs: 1, outputs: 1, hidden: [8], dtype: float64, seed: 2}, loss: {type: mse}, optimizer: {type: Adam, lr: 0.02}, parallel: {type: FullyShardedDataParallel}}"
    check(lib.tessera_session_create(config, group, ctypes.byref(session)))
    points = [0.1 * i for i in range(7)]
    mine = points[rank.value :: size.value]  # unequal, and with many ranks none
    x, y = array(mine, 1), array([math.sin(v) for v in mine], 1)
    for _ in range(5):
        check(lib.tessera_session_step(session, ctypes.byref(x), ctypes.byref(y), ctypes.byref(done)))
        if rank.value == 0:
            print(f"loss {done.loss:.9f} of {done.samples}")
    out = array([0.0] * len(mine), 1)
    check(lib.tessera_session_predict(session, ctypes.byref(x), ctypes.byref(out)))
    assert not mine or any(out.keep[: len(mine)])
    name = ctypes.c_char_p()
    check(lib.tessera_session_weight_name(session, 0, ctypes.byref(name)))
    weight = array([0.0] * 8, 1)
    check(lib.tessera_session_get_weight(session, name, 0, ctypes.byref(weight)))
    if rank.value == 0:
        print("weight", name.value.decode(), sum(weight.keep))
    code = lib.tessera_session_step(session, None, ctypes.byref(y), None) if size.value == 1 else 1
    assert code == 1, code
    if len(sys.argv) > 2:  # a second file with the names of the first
        shutil.copy(sys.argv[2], "again.so")
        check(lib.tessera_load_components(sys.argv[2].encode()))
        assert lib.tessera_load_components(b"./again.so") == 1
        assert b'./again.so: registry: model "Refusing" is registered already' in lib.tessera_last_error()
    lib.tessera_session_free(session)
    lib.tessera_group_free(group)
""")


class Languages(unittest.TestCase):
    def run_(self, *command, timeout=100):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([str(word) for word in command], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True,
                                  timeout=timeout, stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def same(self, outputs, losses):
        first = [float(text) for text in LOSS.findall(outputs[0])]
        self.assertEqual(len(first), losses, outputs[0])
        for output in outputs[1:]:
            for a, b in zip(first, [float(text) for text in LOSS.findall(output)], strict=True):
                self.assertLess(abs(a - b), 1e-6 * (1 + abs(a)), outputs)

    def tessera(self, ranks, *command):
        return self.run_(BUILD / "bin/tessera", "run", "-n", ranks, *command)

    def test_c(self):
        one = self.tessera(1, BUILD / "bin/c_program", BUILD / "lib/libown_components.so")
        self.assertEqual(len(LOSS.findall(one)), 4)
        self.assertIn("2 samples", one)
        three = self.tessera(3, BUILD / "bin/c_program", BUILD / "lib/libown_components.so")
        self.assertIn("9 samples", three)

    def test_ctypes(self):
        library, components = BUILD / "lib/libtessera.so", BUILD / "lib/libown_components.so"
        outputs = [self.tessera(ranks, sys.executable, "-c", BINDING, library, *([components] if ranks == 1 else []))
                   for ranks in (1, 2, 3)]
        self.same(outputs, 5)
        losses = [float(text) for text in LOSS.findall(outputs[0])]
        self.assertLess(losses[-1], losses[0])
        weights = [float(re.search(r"weight layers.0.weight (\S+)", output).group(1)) for output in outputs]
        for weight in weights:
            self.assertAlmostEqual(weight, weights[0], places=6)

    def test_fortran(self):
        """The program itself fails unless the closure that it has learnt halves the error of a step."""
        program, mpirun = BUILD / "bin/advection", shutil.which("mpirun")
        if not program.exists() or not mpirun:
            self.skipTest("no Fortran compiler, or no MPI")
        self.same([self.run_(mpirun, "--oversubscribe", "-n", ranks, program) for ranks in (1, 2, 3, 4)], 3)


if __name__ == "__main__":
    unittest.main()
