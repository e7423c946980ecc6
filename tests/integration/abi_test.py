#!/usr/bin/env python3
"""scripts/check_abi.sh on a small library: abi_test.py SOURCE."""
import pathlib, shutil, subprocess, sys, tempfile, unittest

SCRIPT = pathlib.Path(sys.argv.pop(1)).resolve() / "scripts/check_abi.sh"
BUILD = """cmake_minimum_required(VERSION 3.25)
project(small LANGUAGES CXX)
add_library(tessera SHARED small.cpp)
target_include_directories(tessera PRIVATE include)
set_target_properties(tessera PROPERTIES VERSION 1 SOVERSION {soversion}
                      LIBRARY_OUTPUT_DIRECTORY ${{CMAKE_BINARY_DIR}}/lib)
"""
HEADER = """struct Options {{ int size = 1;{member} }};
int f(const Options& options);
"""
SOURCE = '#include "small.h"\nint f(const Options& options) { return options.size; }\n'


class CheckAbi(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name in ("scripts", "include"):
            (self.folder / name).mkdir()
        shutil.copy(SCRIPT, self.folder / "scripts")
        self.write()
        self.git("init", "--quiet")
        self.commit()

    def write(self, member="", soversion=0, added=""):
        (self.folder / "CMakeLists.txt").write_text(BUILD.format(soversion=soversion))
        (self.folder / "include/small.h").write_text(HEADER.format(member=member) + added)
        (self.folder / "small.cpp").write_text(SOURCE + added.replace(";", " { return 2; }"))

    def git(self, *words):
        return subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t.invalid", *words],
                              cwd=self.folder, check=True, capture_output=True, text=True).stdout

    def commit(self):
        self.git("add", "CMakeLists.txt", "include", "scripts", "small.cpp")
        self.git("commit", "--quiet", "-m", "c")

    def check(self, status, *words):
        """The output of the script, which ends with `status`."""
        run = subprocess.run([self.folder / "scripts/check_abi.sh", *words], capture_output=True,
                             text=True, timeout=200)
        self.assertEqual(run.returncode, status, run.stdout + run.stderr)
        self.assertEqual(len(self.git("worktree", "list").splitlines()), 1)
        return run.stdout + run.stderr

    def test_without_a_tag_there_is_nothing_to_compare_with(self):
        self.assertIn("there is no tag v* yet", self.check(0))
        self.assertIn("'nothing'; expected a tag or a commit", self.check(2, "nothing"))

    def test_the_last_tag_or_a_commit_is_compared_with(self):
        self.git("tag", "v1.0")
        self.write(added="int g();\n")
        self.assertIn("linked with v1.0 run with this libtessera (libtessera.so.0)", self.check(0))
        self.write(member=" int more = 2;")
        self.assertIn("still libtessera.so.0; expected a higher TESSERA_SOVERSION",
                      " ".join(self.check(1).split()))
        self.commit()
        self.assertIn("linked with HEAD run", self.check(0, "HEAD"))
        self.write(member=" int more = 2;", soversion=1)
        self.assertIn("libtessera.so.0 was, libtessera.so.1 is", self.check(0))


if __name__ == "__main__":
    unittest.main()
