#!/usr/bin/env python3
"""docs/libtorch_internals.md is complete and right: it has every private header and name of libtorch
that the sources use, and the files and tests that it names exist."""
import pathlib, re, sys, unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tree

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
PAGE = "docs/libtorch_internals.md"
HEADER = re.compile(r"#include <(?:torch/csrc|c10/core|caffe2)/((?:autograd|distributed|impl|serialize)/[^>]+)>")
NAME = re.compile(
    r"DispatchKey::(?!Undefined)\w+|c10::impl::\w+|at::(?:detail::\w+|_\w+)|torch::autograd::impl::\w+|torch::jit::(?:Stack|last)\b|"
    r"c10::(?:SetAllocator|GetDefaultCPUAllocator|memoryProfilingEnabled|gAlignment|autocast_dispatch_keyset)|"
    r"\b(?:set_data_ptr_noswap|\w*data_ptr_(?:no_checks|access_error_msg_)|release_data_\w+|bump_version|\w*version_counter|unsafe_storage|"
    r"set_sizes_contiguous|redispatchBoxed|callBoxed|raw_deleter|queue_callback|is_checkpoint_valid|get_current_graph_task_exec_info|make_capsule|"
    r"AutoDispatch\w+|FunctionP\w+Hook)\b")


def without_comments(text):
    return re.sub(r"//[^\n]*", "", text)


class Internals(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.page = (SOURCE / PAGE).read_text()
        cls.words = re.findall(r"`([^`\n]+)`", cls.page)
        cls.rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in cls.page.splitlines()
                    if line.startswith("| `")]

    def test_the_page_has_every_private_name_of_the_sources(self):
        found = set()
        for name in tree.files(SOURCE, ["src", "include", "cli"], (".h", ".cpp", ".inc")):
            text = without_comments((SOURCE / name).read_text())
            for private in HEADER.findall(text) + NAME.findall(text):
                found.add(private)
                self.assertTrue(private in self.words, f"{name} uses {private}, which {PAGE} does not have")
        self.assertGreater(len(found), 50)

    def test_a_file_has_the_names_of_its_line(self):
        self.assertGreater(len(self.rows), 30)
        for names, file, without, _ in self.rows:
            text = without_comments((SOURCE / file.strip("`")).read_text())
            for name in re.findall(r"`([^`]+)`", names):
                self.assertTrue(name in text, f"{PAGE}: {file} has no {name}")
            self.assertTrue(without, names)

    def test_files_and_tests_exist(self):
        sources = "".join((SOURCE / name).read_text() for name in tree.files(SOURCE, ["tests"], (".cpp",)))
        tests = {f"{suite}.{test}" for suite, test in re.findall(r"\bTEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)", sources)}
        for word in self.words:
            if re.match(r"(src|include|tests|scripts)/", word):
                self.assertTrue((SOURCE / word.split()[0]).is_file(), word)
            elif re.fullmatch(r"[A-Z]\w+\.[A-Z]\w+", word):
                self.assertTrue(word in tests, f"{PAGE}: no test {word}")
        for *_, test in self.rows:
            self.assertTrue(test == "compiled only" or test.strip("`") in tests, f"{PAGE}: test {test}")


if __name__ == "__main__":
    unittest.main()
