#!/usr/bin/env python3
"""libtessera exports what include/ declares, and nothing else.

    exports_test.py BUILD

The compiler says what include/ declares: a file that includes all public headers has one line for
each name, and a name that the headers do not declare is an error in its line. Overloads count as
one name."""
import json, pathlib, re, shlex, subprocess, sys, tempfile, unittest

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
LIBRARY, OBJECTS = BUILD / "lib/libtessera.so", BUILD / "src/libtessera_internals.a"
CACHE = (BUILD / "CMakeCache.txt").read_text()
INCLUDE = pathlib.Path(re.search("(?m)^CMAKE_HOME_DIRECTORY.*=(.*)$", CACHE)[1]) / "include"
OF_A_CLASS = re.compile("(?:vtable|VTT|typeinfo|typeinfo name) for (.*)")
OF_A_FUNCTION = re.compile("guard variable for |(?:non-)?virtual thunk to |reference .*for ")


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout


def symbols(file, *options):
    """{demangled: type of nm} of the symbols that `file` defines for other files."""
    lines = output_of("nm", "-C", "--defined-only", "--extern-only", *options, file).splitlines()
    found = (re.match(r"[0-9a-f]+ (\w) (.*)", line) for line in lines)
    return {match[2]: match[1] for match in found if match}


def outside_of_brackets(text):
    """`text` with the inside of (), <> and {}, and operators, as underscores."""
    text = re.sub(r"operator(?:<=>|<<=?|>>=?|->\*?|[<>]=?|\(\))", lambda m: "_" * len(m[0]), text)
    depth, result = 0, ""
    for letter in text:
        depth -= letter in ")>}"
        result += "_" if depth else letter
        depth += letter in "(<{"
    return result


def of_a_class(symbol):
    """Whether it is a class's table or type; types of functions have them too."""
    found = OF_A_CLASS.fullmatch(symbol)
    return bool(found) and " " not in outside_of_brackets(found[1])


def name_of(symbol):
    """(the class, function or variable that a header must declare, whether it is a class)."""
    if of_a_class(symbol):
        return OF_A_CLASS.fullmatch(symbol)[1], True
    symbol = re.sub(r"\[abi:\w+\]", "", OF_A_FUNCTION.sub("", symbol))
    visible = outside_of_brackets(symbol).partition("(")[0]  # a function, also of a variable in it
    begin = 0 if "operator " in visible else visible.rfind(" ") + 1  # behind the type of its result
    scope = visible.rfind("::")
    of, name = symbol[begin:scope], symbol[scope + 2:len(visible)]
    if name.startswith("~") or name == visible[begin:scope].rpartition("::")[2].partition("<")[0]:
        return of, True  # a constructor or destructor
    name = name if name.startswith("operator") else name.partition("<")[0]
    return f"{of}::{name}" if scope >= 0 else symbol[begin:len(visible)], False


def declared(names):
    """Those of `names` that the public headers declare, and define if they are classes."""
    commands = json.loads((BUILD / "compile_commands.json").read_text())
    words = next(words for words in (shlex.split(entry["command"]) for entry in commands)
                 if "-include" in words and "/tessera_train.dir/" in words[words.index("-o") + 1])
    headers = sorted(INCLUDE.rglob("*.h"))
    text = ["#include <torch/csrc/distributed/c10d/Store.hpp>"]  # headers declare it only
    text += [f'#include "{header}"' for header in headers if header.name != "mpi.h"]
    names = list(names)
    text += [f"using n{i} = {f'char[sizeof({name})]' if a_class else f'decltype(&{name})'};"
             for i, (name, a_class) in enumerate(names)]
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "names.cpp"
        source.write_text("\n".join(text))
        words = words[:words.index("-o")] + ["-fsyntax-only", "-w", "-fno-access-control",
                                             "-fmax-errors=0", str(source)]
        run = subprocess.run(words, cwd=BUILD, capture_output=True, text=True, timeout=500)
    errors = re.findall(r"names\.cpp:(\d+):\d+: error: (.*)", run.stderr)
    first = len(text) - len(names) + 1
    if any(int(line) < first for line, _ in errors) or (run.returncode and not errors):
        raise RuntimeError(f"{' '.join(words)}: {run.stderr}")
    missing = {int(line) - first for line, error in errors if "overloaded" not in error}
    return {name for i, name in enumerate(names) if i not in missing}


class Exports(unittest.TestCase):
    maxDiff = None
    @classmethod
    def setUpClass(cls):
        cls.exported = symbols(LIBRARY, "-D")
        cls.defined = {symbol: kind for symbol, kind in symbols(OBJECTS).items()
                       if re.search("(^| )tessera(::|_)", outside_of_brackets(symbol))}
        cls.known = (("tessera::ProcessGroup::barrier", False), ("tessera::UsageError", True),
                     ("tessera::state_dict", False), ("tessera_group_free", False))
        cls.unknown = (("tessera::ProcessGroup::barriers", False), ("tessera_group", True),
                       ("tessera::ProcessGroup::Impl::issue", False), ("tessera::zero::Plan", True),
                       ("tessera::ProcessGroup::Impl", True), ("tessera::comm::all_equal", False))
        names = {name_of(symbol) for symbol in cls.exported.keys() | cls.defined.keys()}
        cls.declared = declared(names | set(cls.known) | set(cls.unknown))

    def test_the_compiler_knows_what_is_declared(self):
        self.assertLessEqual(set(self.known), self.declared)
        self.assertFalse(set(self.unknown) & self.declared)

    def test_what_is_exported_is_declared(self):
        self.assertGreater(len(self.exported), 500)
        self.assertEqual([symbol for symbol in self.exported
                          if not re.match("tessera(::|_)", name_of(symbol)[0])], [])
        self.assertEqual([symbol for symbol in self.exported
                          if name_of(symbol) not in self.declared], [])

    def test_what_is_declared_and_defined_is_exported(self):
        """Inline functions are not: each program has its own."""
        wanted = [symbol for symbol, kind in self.defined.items()
                  if kind in "TBDR" or of_a_class(symbol)]
        self.assertGreater(len(wanted), 1000)
        self.assertEqual([symbol for symbol in wanted
                          if name_of(symbol) in self.declared and symbol not in self.exported], [])

    def test_no_program_has_the_library_twice(self):
        programs = [path for path in (BUILD / "bin").iterdir()
                    if path.read_bytes()[:4] == b"\x7fELF"]
        self.assertTrue(programs)
        for program in programs:
            library = "libtessera.so" in output_of("readelf", "-dW", program)
            symbols_of = output_of("nm", "--defined-only", program)
            self.assertFalse(library and "_ZN7tessera12ProcessGroup4ImplC" in symbols_of, program)


if __name__ == "__main__":
    unittest.main()
