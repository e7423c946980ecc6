#!/usr/bin/env python3
"""What CMake refuses before a build, the pkg-config file, and the script that draws README's picture."""
import json, pathlib, re, shutil, subprocess, sys, tempfile, unittest

SOURCE, BUILD = (pathlib.Path(word).resolve() for word in (sys.argv.pop(1), sys.argv.pop(1)))
NEW = '#include <string>\nvoid f(const std::string& text) {}\n'


def call(*words, **options):
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=100, **options)


class Getting(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.temporary.name)

    def tearDown(self):
        self.temporary.cleanup()

    def fake_torch(self, name, *flags):
        """A folder like a wheel's, whose libraries have one function."""
        torch = self.folder / name
        (torch / "include/torch/csrc/autograd").mkdir(parents=True)
        (torch / "include/torch/csrc/autograd/variable.h").touch()
        (torch / "lib").mkdir()
        for library in ("torch_cpu", "c10"):
            done = call("g++", "-shared", "-fPIC", *flags, "-x", "c++", "-", "-o", torch / f"lib/lib{library}.so", input=NEW)
            self.assertEqual(done.returncode, 0, done.stderr)
        return torch

    def configure(self, before, *words):
        """Output of a project that uses TesseraTorch.cmake after the lines `before`."""
        project = self.folder / "project"
        project.mkdir(exist_ok=True)
        (project / "CMakeLists.txt").write_text(
            f'cmake_minimum_required(VERSION 3.25)\nproject(p LANGUAGES CXX)\n{before}\ninclude({SOURCE}/cmake/TesseraTorch.cmake)\n'
            'message(STATUS "takes [${TESSERA_TORCH}]")\n')
        done = call("cmake", "-S", project, "-B", self.folder / "b", "--fresh", *words)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    @staticmethod
    def found(torch):
        return f"add_library(c10 SHARED IMPORTED)\nset_target_properties(c10 PROPERTIES IMPORTED_LOCATION {torch}/lib/libc10.so)"

    def test_the_old_abi_is_refused_by_name(self):
        torch = self.fake_torch("old", "-D_GLIBCXX_USE_CXX11_ABI=0")
        code, text = self.configure("", f"-DTESSERA_TORCH={torch}")
        self.assertNotEqual(code, 0)
        self.assertIn("old/lib/libc10.so was built with the old C++ ABI", text)

    def test_the_new_abi_is_taken(self):
        code, text = self.configure("", f"-DTESSERA_TORCH={self.fake_torch('new')}")
        self.assertEqual(code, 0, text)

    def test_the_torch_that_the_project_found_is_taken(self):
        torch = self.fake_torch("theirs")
        code, text = self.configure(self.found(torch))
        self.assertEqual(code, 0, text)
        self.assertIn(f"takes [{torch}]", text)

    def test_a_torch_of_any_configuration_is_seen(self):
        torch = self.fake_torch("theirs")
        code, text = self.configure(f"add_library(c10 SHARED IMPORTED)\nset_target_properties(c10 PROPERTIES IMPORTED_CONFIGURATIONS RELWITHDEBINFO "
                                    f"IMPORTED_LOCATION_RELWITHDEBINFO {torch}/lib/libc10.so)")
        self.assertEqual(code, 0, text)
        self.assertIn(f"takes [{torch}]", text)

    def test_a_second_torch_is_refused_by_name(self):
        theirs, ours = self.fake_torch("theirs"), self.fake_torch("ours")
        code, text = self.configure(self.found(theirs), f"-DTESSERA_TORCH={ours}")
        self.assertNotEqual(code, 0)
        for part in ("theirs/lib/libc10.so", "ours/lib/libc10.so", "expected one libtorch"):
            self.assertIn(part, text)

    def test_parts_of_two_libtorches_are_refused_by_name(self):
        torch, other = self.fake_torch("theirs"), self.fake_torch("other")
        for folder in (torch, other):
            (folder / "lib/libtorch.so").touch()
        found = self.found(torch) + "\nset(Torch_FOUND TRUE)"
        code, text = self.configure(f"{found}\nset(TORCH_LIBRARY {torch}/lib/libtorch.so)\nset(TORCH_INSTALL_PREFIX {torch})")
        self.assertEqual(code, 0, text)
        for variable in (f"TORCH_LIBRARY {other}/lib/libtorch.so", f"TORCH_INSTALL_PREFIX {other}"):
            code, text = self.configure(f"{found}\nset({variable})")
            self.assertNotEqual(code, 0)
            self.assertIn("parts of two libtorches", text)
            self.assertIn("other/lib/lib", text)

    def test_an_installed_tessera_does_not_take_another_torch(self):
        code, text = self.configure(self.found(self.fake_torch("theirs")) + "\nset(TESSERA_INSTALLED TRUE)")
        self.assertNotEqual(code, 0)
        self.assertIn("expected one libtorch", text)
        config = (BUILD / "TesseraConfig.cmake").read_text()
        self.assertLess(config.index("set(TESSERA_INSTALLED TRUE)"), config.index("/TesseraTorch.cmake)"))

    def test_a_project_with_find_package_torch_gets_one_libtorch(self):
        source = SOURCE / "tests/integration/beside_torch/CMakeLists.txt"
        self.assertIn(f"```cmake\n{source.read_text()}```", (SOURCE / "docs/getting.md").read_text())
        shutil.copy(source, self.folder)
        shutil.copy(SOURCE / "examples/zero_loop.cpp", self.folder)
        for component in ("runtime", "development"):
            done = call("cmake", "--install", BUILD, "--prefix", self.folder / "prefix", "--component", component)
            self.assertEqual(done.returncode, 0, done.stderr)
        words = [f"-DCMAKE_PREFIX_PATH={self.folder}/prefix"]
        torch = re.search(r"(?m)^TESSERA_TORCH:PATH=(.*)$", (BUILD / "CMakeCache.txt").read_text())[1]
        if torch:
            words = [f"-DCMAKE_PREFIX_PATH={self.folder}/prefix;{torch}/share/cmake;{torch}"]
        done = call("cmake", "-S", self.folder, "-B", self.folder / "b", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *words)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(len(set(re.findall(r"\S*/libtorch_cpu\.so", (self.folder / "b/build.ninja").read_text()))), 1)

    def fetch(self, *words):
        """Output of a project that uses TesseraFetch.cmake."""
        project = self.folder / "project"
        project.mkdir(exist_ok=True)
        (project / "CMakeLists.txt").write_text(
            f"cmake_minimum_required(VERSION 3.25)\nproject(p LANGUAGES CXX)\ninclude({SOURCE}/cmake/TesseraFetch.cmake)\n")
        done = call("cmake", "-S", project, "-B", self.folder / "b", *words)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    def test_what_is_fetched_is_compared_with_its_digest(self):
        archive = self.folder / "mirror/pool/main/x/xxhash/xxhash_0.8.1.orig.tar.gz"
        archive.parent.mkdir(parents=True)
        archive.write_bytes(b"other bytes")
        code, text = self.fetch(f"-DTESSERA_FETCH_MIRROR=file://{self.folder}/mirror")
        self.assertNotEqual(code, 0)
        self.assertRegex(text, "(?i)hash mismatch|does not match expected")
        self.assertIn("xxhash_0.8.1.orig.tar.gz", text)

    def test_packages_have_the_maintainer_that_was_given(self):
        if not (BUILD / "CPackConfig.cmake").exists():
            self.skipTest("a build against a wheel makes no packages")
        contact = re.search(r"(?m)^TESSERA_PACKAGE_CONTACT:STRING=(.*)$", (BUILD / "CMakeCache.txt").read_text())[1]
        self.assertRegex(contact, "^.+ <.+@.+>$")
        self.assertNotIn("localhost", contact)
        self.assertIn(f'set(CPACK_PACKAGE_CONTACT "{contact}")', (BUILD / "CPackConfig.cmake").read_text())

    def test_the_pkg_config_file_has_the_prefix_of_the_installation(self):
        done = call("cmake", "--install", BUILD, "--prefix", self.folder / "p", "--component", "development")
        self.assertEqual(done.returncode, 0, done.stderr)
        (file,) = (self.folder / "p").rglob("tessera.pc")
        text = file.read_text()
        self.assertIn(f"prefix={self.folder / 'p'}\n", text)
        self.assertIn("-ltessera", text)
        self.assertNotIn("-isystem /usr/include ", text)  # hides GCC's own headers

    def test_the_picture_has_a_colour_and_a_label_for_each_start(self):
        log = self.folder / "log.jsonl"
        log.write_text("".join(json.dumps({"step": step, "loss": 5 - step / 4}) + "\n" for step in range(12)))
        starts = [{"event": "start", "step": 0, "ranks": 4, "parallel": "ZeRO"}, {"event": "start", "step": 8, "ranks": 2, "parallel": "<F>"}]
        (self.folder / "log.events.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
        done = call(sys.executable, SOURCE / "scripts/draw_resume.py", log, self.folder / "o.svg")
        self.assertEqual(done.returncode, 0, done.stderr)
        svg = (self.folder / "o.svg").read_text()
        self.assertIn("4 ranks, ZeRO<", svg)
        self.assertIn("2 ranks, &lt;F&gt;<", svg)
        paths = [line for line in svg.splitlines() if 'fill="none"' in line]
        self.assertEqual([path.count("L") for path in paths], [7, 3])


if __name__ == "__main__":
    unittest.main()
