#!/usr/bin/env python3
"""No class, function or file is too large, and stored callbacks are named in docs/design.md.

    size_test.py SOURCE            the test
    size_test.py SOURCE --list     prints today's exceptions, as sizes.txt has them

The exceptions are in sizes.txt with their present size. One that has shrunk fails too, so that the
list can only become shorter. The block ```callbacks of docs/design.md has the members of classes in
src/ and cli/ that hold a std::function."""
import pathlib, re, sys, unittest

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import cpp, tree

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
MOST = {"functions": 25, "members": 15, "lines of": 60, "lines": 400}
SUFFIXES = (".h", ".cpp", ".inc")


def measured(files):
    """What is measured, by (kind, file, name): `files` has the text by name."""
    found = {}
    for file, text in files.items():
        source = cpp.Reader(text)
        found["lines", file, ""] = text.count("\n")
        for function in source.functions:
            key = "lines of", file, function.name
            found[key] = max(found.get(key, 0), function.lines)
        for each in source.classes:
            found["functions", file, each.name] = len(each.functions)
            found["members", file, each.name] = len(each.members)
    return found


def read_exceptions(text):
    """Sizes by (kind, file, name), from lines such as `53 functions of ZeRO in src/zero/impl.h`."""
    exceptions = {}
    for line in text.splitlines():
        if not line.partition("#")[0].strip():
            continue
        found = re.fullmatch(r"(\d+) (?:(functions|members|lines) of (\S+)|lines) in (\S+)", line)
        if not found:
            raise ValueError(f"sizes.txt: {line!r}: expected a line as --list prints it")
        kind = "lines of" if found[2] == "lines" else found[2] or "lines"
        exceptions[kind, found[4], found[3] or ""] = int(found[1])
    return exceptions


def shown(kind, file, name, size):
    return f"{size} {kind.split()[0]}{' of ' + name if name else ''} in {file}"


def problems(sizes, exceptions):
    found = []
    for key, size in sizes.items():
        allowed = exceptions.get(key, MOST[key[0]])
        if size > allowed:
            found.append(f"{shown(*key, size)}, expected at most {allowed}")
    for key, size in exceptions.items():
        now = sizes.get(key, 0)
        if now <= MOST[key[0]]:
            found.append(f"sizes.txt: {shown(*key, size)}: it has {now} now; remove the line")
        elif now < size:
            found.append(f"sizes.txt: {shown(*key, size)}: it has {now} now; lower the number")
    return found


def callbacks(files, headers=()):
    """`Class::member` of each member in `files` that holds a std::function, also through an alias
    that they or the texts `headers` have."""
    sources = [cpp.Reader(text) for text in files.values()]
    aliases = {name for text in (*files.values(), *headers)
               for name in re.findall(r"using\s+(\w+)\s*=\s*std::function<", text)}
    held = re.compile(rf"std::function<|(const\s+)?(\w+::)*({'|'.join(aliases) or '$^'})\b")
    return sorted({f"{each.name}::{member}" for source in sources for each in source.classes
                   for member, declaration in each.members
                   if held.match(declaration) or "std::function<" in declaration})


def read_callbacks(text):
    blocks = re.findall(r"^```callbacks\n(.*?)^```", text, re.M | re.S)
    if len(blocks) != 1:
        raise ValueError(f"docs/design.md: {len(blocks)} blocks ```callbacks; expected one")
    lines = [line.partition("#")[0].split() for line in blocks[0].splitlines()]
    return sorted(f"{each}::{member}" for each, *members in filter(None, lines)
                  for member in members)


def texts(folders):
    return {name: (SOURCE / name).read_text() for name in tree.files(SOURCE, folders, SUFFIXES)}


class Sizes(unittest.TestCase):
    maxDiff = None

    def test_nothing_is_too_large(self):
        files = texts(("src", "include", "cli"))
        self.assertGreater(len(files), 100, "the list of sources is not complete")
        found = problems(measured(files), read_exceptions((HERE / "sizes.txt").read_text()))
        if found:
            self.fail("\n" + "\n".join(found) + "\nThe limits: CONTRIBUTING.md, section Code.")

    def test_the_ways_of_the_design_are_in_the_code(self):
        ways = re.findall(r"```way\n(.*?)```", (SOURCE / "docs/design.md").read_text(), re.S)
        self.assertEqual(len(ways), 6)
        for way in ways:
            for line in way.splitlines():
                name, path = line.split("#")[0].split()
                function = re.escape(name.split("::")[-1])
                self.assertRegex((SOURCE / path).read_text(), rf"\b{function}\(", f"{path}: no {name}")

    def test_the_design_names_every_stored_callback(self):
        named = read_callbacks((SOURCE / "docs/design.md").read_text())
        headers = texts(("include",)).values()
        self.assertEqual(named, callbacks(texts(("src", "cli")), headers))


class Rules(unittest.TestCase):
    """The reader and the rules, on small sources."""

    SMALL = """
#define BRACE {
namespace a::b { namespace {
enum class Kind { one, two };
struct sigaction before {};
constexpr int table[] = {1, 2};
const auto call = [](int x) { return x; };
// class Comment { int a; };
template <class T, class U = std::map<int, int>>
class Thing final : public Base<T> {
 public:
  explicit Thing(Options options = {}) : a_{1}, b_(2) { call(); }
  Thing(const Thing&) = delete;
  virtual ~Thing();
  bool operator()(int x) const { return x < 3 && x > 1; }
  bool operator<(const Thing& other) const;
  std::vector<std::function<void(int)>> all() const { return {}; }
  friend class Other;
  using Step = std::function<void()>;
  static constexpr int kMost = 3;
  struct Inner { int x = f(3), y{2}; char buffer[16] = ""; } inner_;

 private:
  [[noreturn]] void fail(const std::string& text = "};") const;
  int a_ = 0, b_ = 1;
  std::map<std::string, int> names_{{"a", 1}, {"b", 2}};
  std::function<void(int, double)> done_ = [](int, double) { return; };
  const Step step_;
  void (*plain_)(int) = nullptr;
};
}}
auto Thing::all() const
    -> int {
  return R"({)"[0] + '{' + 1'000;
}
"""

    def test_the_reader_finds_functions_and_members(self):
        source = cpp.Reader(self.SMALL)
        thing, inner = source.classes
        self.assertEqual((thing.name, inner.name), ("Thing", "Thing::Inner"))
        self.assertEqual(thing.functions,
                         ["Thing", "~Thing", "operator_", "operator_", "all", "fail"])
        self.assertEqual([name for name, _ in thing.members],
                         ["inner_", "a_", "b_", "names_", "done_", "step_", "plain_"])
        self.assertEqual([name for name, _ in inner.members], ["x", "y", "buffer"])
        self.assertEqual([(each.name, each.lines) for each in source.functions],
                         [("Thing", 1), ("operator_", 1), ("all", 1), ("Thing::all", 4)])
        self.assertEqual(callbacks({"a.h": self.SMALL}), ["Thing::done_", "Thing::step_"])

    def test_a_brace_that_is_never_closed_is_an_error(self):
        self.assertRaises(ValueError, cpp.Reader, "void f() {")

    def test_what_is_too_large_is_found(self):
        files = {"a.cpp": "struct A {\n" + "int a;\n" * 16 + "void f();\n" * 26 + "};\n"
                          "void g() {\n" + ";\n" * 59 + "}\n" + "\n" * 400}
        self.assertEqual([problem.split(",")[0] for problem in problems(measured(files), {})],
                         ["505 lines in a.cpp", "61 lines of g in a.cpp",
                          "26 functions of A in a.cpp", "16 members of A in a.cpp"])

    def test_exceptions_can_only_shrink(self):
        sizes = {("members", "a.h", "A"): 20}
        for size, word in ((20, ""), (19, "at most 19"), (21, "lower the number")):
            found = problems(sizes, read_exceptions(f"# why\n{size} members of A in a.h\n"))
            self.assertEqual(len(found), 1 if word else 0)
            self.assertIn(word, "".join(found))
        self.assertIn("remove the line", problems({}, {("lines", "a.h", ""): 500})[0])
        self.assertRaises(ValueError, read_exceptions, "many lines in a.h")


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print("# What exceeds the limits of size_test.py. A number here may only become smaller.")
        for key, size in sorted(measured(texts(("src", "include", "cli"))).items()):
            if size > MOST[key[0]]:
                print(shown(*key, size))
    else:
        unittest.main()
