#!/usr/bin/env python3
"""No source has a path from a file to an interpreter: reading a file never runs it."""
import pathlib, re, sys, unittest

sys.dont_write_bytecode = True

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
PATHS = [r"torch/(csrc/jit|script\.h)", r"torch::jit::(?!Stack\b|last\b|drop\b)", r"\btorch::(pickle_)?load\s*\(", r"\bload_from\b",
         r"\bpickle_load\b", r"\bUnpickler\b", r"\bimport_ir_module\b", r"\bCompilationUnit\b", r"\bPython\.h\b", r"\bdlopen\b",
         r"\b(std::system|::system|popen)\b"]
# Values of the program itself, under names that are checked: see named_values.h. The second is a key
# of mmengine's configs. The third loads a shared object that a program in C names in a call.
ALLOWED = {("src/optim/named_values.cpp", "load_from"), ("src/train/config/spellings.cpp", "load_from"), ("src/c/group.cpp", "dlopen")}


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def found_in(text):
    text = without_comments(text)
    return {match.group(0) for path in PATHS for match in re.finditer(path, text)}


class Interpreter(unittest.TestCase):
    def test_no_source_reaches_one(self):
        files = [f for folder in ("src", "include", "cli") for f in sorted((SOURCE / folder).rglob("*")) if f.suffix in (".h", ".cpp", ".inc")]
        self.assertGreater(len(files), 100)
        found = {(str(f.relative_to(SOURCE)), name) for f in files for name in found_in(f.read_text())}
        self.assertEqual(found, ALLOWED)

    def test_paths_are_seen(self):
        for line in ("#include <torch/script.h>", "auto m = torch::jit::load(path);", "torch::load(net, path);", "archive.load_from(path);",
                     "torch::pickle_load(bytes)", "torch::jit::Unpickler u;", "::dlopen(path, 0)", "std::system(text)"):
            self.assertTrue(found_in(line), line)
        for line in ("torch::jit::Stack stack;", "// torch::jit::load runs code", "load_weights(path)"):
            self.assertFalse(found_in(line), line)


if __name__ == "__main__":
    unittest.main()
