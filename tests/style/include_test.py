#!/usr/bin/env python3
"""Includes only point down. The layers are in docs/design.md, in the block marked ```layers
(who may include whom) and the one marked ```headers (which folder implements a public header that
is not named after a .cpp file)."""
import collections, pathlib, re, sys, unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tree

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
SUFFIXES = (".h", ".cpp", ".inc")
PUBLIC = "include/tessera/"
GENERATED = {"tessera/version.h"}

Layer = collections.namedtuple("Layer", "level part may")  # 3.1 is level 3, part 1


def block(text, name):
    found = re.findall(rf"^```{name}\n(.*?)^```", text, re.M | re.S)
    if len(found) != 1:
        raise ValueError(f"docs/design.md: {len(found)} blocks ```{name}; expected one")
    lines = [line.partition("#")[0].split() for line in found[0].splitlines()]
    return [line for line in lines if line]


def read_layers(text):
    """Layers by name, from lines such as `3.1  comm/base  below`, the lowest first."""
    layers, last = {}, (0, 0)
    for number, name, *may in block(text, "layers"):
        level, _, part = number.partition(".")
        place = (int(level), int(part or 0))
        if place < last or name in layers or not may:
            raise ValueError(f"docs/design.md: layers: line of {name}; expected a level (the "
                             "lowest first), a folder (once), and what it may include")
        layers[name], last = Layer(*place, may), place
    for name, layer in layers.items():
        above = layers.get(name.split("/")[0])
        if above is None or above.level != layer.level:
            raise ValueError(f"docs/design.md: layers: {name}: expected a line of its parent "
                             "folder on the same level")
        unknown = set(layer.may) - {"below", "nothing", "public"} - set(layers)
        if unknown:
            raise ValueError(f"docs/design.md: layers: {name}: no folder {', '.join(unknown)}")
    return layers


def read_headers(text, layers, names):
    """Folder in src/ by public header (`tessera/x.h`): as listed, else that of its x.cpp."""
    owners = {}
    for layer, *headers in block(text, "headers"):
        if layer not in layers or "/" in layer:
            raise ValueError(f"docs/design.md: headers: no folder {layer} in the layers")
        for header in headers:
            if PUBLIC + header not in names | {"include/" + g for g in GENERATED}:
                raise ValueError(f"docs/design.md: headers: {header} does not exist")
            owners["tessera/" + header] = layer
    folders = collections.defaultdict(set)
    for name in names:
        if name.startswith("src/") and name.endswith(".cpp"):
            folders[pathlib.PurePath(name).stem].add(name.split("/")[1])
    for name in sorted(names):
        header = name.removeprefix("include/")
        if name.startswith(PUBLIC) and header not in owners:
            found = folders[pathlib.PurePath(name).stem]
            if len(found) != 1:
                raise ValueError(f"{name}: found {len(found)} folders with a .cpp file of that "
                                 "name; list it in docs/design.md, block headers")
            owners[header] = found.pop()
    return owners


class Tree:
    """Layers, and where a file or an include belongs."""

    def __init__(self, text, names):
        self.layers = read_layers(text)
        self.names = names
        self.owners = read_headers(text, self.layers, names)

    def layer_of(self, name):
        """The layer of a file, and whether it is a public header."""
        if name.startswith(PUBLIC):
            return self.owners[name.removeprefix("include/")], True
        folder = name.rpartition("/")[0].removeprefix("src/")
        return (folder, False) if folder in self.layers else (None, False)

    def resolve(self, includer, text):
        """The file that `#include "text"` means; None when there is none."""
        places = ("include/", "src/", includer.rpartition("/")[0] + "/")
        return next((place + text for place in places if place + text in self.names), None)

    def wrong(self, includer, included):
        """Why `includer` may not include `included`; "" when it may."""
        (upper, upper_public), (lower, lower_public) = map(self.layer_of, (includer, included))
        if upper is None:
            return "its folder is not in the layers"
        if lower is None:
            return f"the folder of {included} is not in the layers"
        if upper_public and not lower_public:
            return f"a public header, and {included} is not"
        top, other_top = upper.split("/")[0], lower.split("/")[0]
        if top != other_top:
            a, b = self.layers[top], self.layers[other_top]
            return self.refusal(top, a.may, a.level, other_top, b.level, lower_public)
        # The public headers of a folder lie below all of its sources.
        if lower_public or upper == lower:
            return ""
        a, b = self.layers[upper], self.layers[lower]
        return self.refusal(upper, a.may, a.part, lower, b.part, False)

    @staticmethod
    def refusal(upper, may, height, lower, lower_height, lower_public):
        if height <= lower_height:
            return f"{lower} is {'beside' if height == lower_height else 'above'} {upper}"
        if "below" in may or lower == "common" or "public" in may and lower_public or lower in may:
            return ""
        allowed = "public headers only" if may == ["public"] else ", ".join(may)
        return f"{upper} may include {allowed}, not {lower}"

    def includes_of(self, name, text):
        """Line number, text and target (None: not found) of each #include "…"."""
        for number, line in enumerate(text.split("\n"), 1):
            match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if match and match[1] not in GENERATED:
                yield number, match[1], self.resolve(name, match[1])

    def problems(self, read):
        """All includes that are wrong, as texts; `read` returns a file's text."""
        found = []
        for name in sorted(self.names):
            for number, text, target in self.includes_of(name, read(name)):
                why = (self.wrong(name, target) if target else
                       "no such file in include/, in src/ or beside it")
                if why:
                    found.append(f'{name}:{number}: includes "{text}": {why}')
        return found

    def cycle(self, read):
        """A cycle of includes as a list of files, the first one again at its end; or []."""
        edges = {name: [target for _, _, target in self.includes_of(name, read(name)) if target]
                 for name in self.names}
        done, path = set(), []

        def visit(name):
            if name in path:
                return path[path.index(name):] + [name]
            if name in done:
                return []
            path.append(name)
            found = next((cycle for target in edges[name] if (cycle := visit(target))), [])
            path.pop()
            done.add(name)
            return found

        return next((found for name in sorted(edges) if (found := visit(name))), [])

    def with_libtorch(self, layers, read):
        """Files of `layers` that include libtorch, themselves or through others."""
        def uses(name, seen):
            if name in seen:
                return False
            seen.add(name)
            text = read(name)
            return (re.search(r"^\s*#\s*include\s+<(torch|ATen|c10)/", text, re.M) is not None
                    or any(target and uses(target, seen)
                           for _, _, target in self.includes_of(name, text)))

        return [name for name in sorted(self.names)
                if (self.layer_of(name)[0] or "").split("/")[0] in layers and uses(name, set())]


DESIGN = (SOURCE / "docs/design.md").read_text()
CODE = frozenset(tree.files(SOURCE, ("src", "cli", "include/tessera"), SUFFIXES))
CHECKED = Tree(DESIGN, CODE)


def read(name):
    return (SOURCE / name).read_text()


class Includes(unittest.TestCase):
    maxDiff = None

    def check(self, problems, remedy):
        if problems:
            self.fail("\n" + "\n".join(problems) + "\n" + remedy)

    def test_the_layers_name_the_folders_that_there_are(self):
        folders = {name.rpartition("/")[0].removeprefix("src/") for name in CODE
                   if not name.startswith(PUBLIC)}
        named = {name for name in CHECKED.layers
                 if not any(other.startswith(name + "/") for other in CHECKED.layers)}
        only_headers = set(CHECKED.owners.values()) - folders - {f.split("/")[0] for f in folders}
        self.assertEqual(sorted(folders - set(CHECKED.layers)), [], "not in the layers")
        self.assertEqual(sorted(named - folders - only_headers), [], "in the layers only")

    def test_includes_only_point_down(self):
        self.check(CHECKED.problems(read), "The layers: docs/design.md, section Layers.")

    def test_no_file_includes_itself_through_others(self):
        self.assertEqual(" -> ".join(CHECKED.cycle(read)), "")

    def test_configs_and_the_launcher_include_no_libtorch(self):
        self.assertEqual(CHECKED.with_libtorch(("config", "launch"), read), [])


LAYERS = """
```layers
1     common        nothing
2     memory        common
2     optim         common
3     comm          common memory
3.1   comm/base     below
3.2   comm/shm      below
3.2   comm/p2p      below
3.3   comm/top      comm/base
4     ddp           below
4     zero          below
5     train         public
```
```headers
common  error.h
```
"""


class Rules(unittest.TestCase):
    """The rules, on a small tree."""

    FILES = {"include/tessera/error.h", "include/tessera/comm.h", "include/tessera/zero.h",
             "src/memory/heap.h", "src/optim/adam.h", "src/comm/base/comm.cpp",
             "src/comm/base/base.h", "src/comm/shm/shm.h", "src/comm/p2p/p2p.h",
             "src/comm/top/top.h", "src/ddp/ddp.h", "src/zero/zero.cpp", "src/train/run.cpp"}

    def problem(self, includer, included):
        files = collections.defaultdict(str, {includer: f'#include "{included}"\n'})
        found = Tree(LAYERS, self.FILES).problems(files.__getitem__)
        return found[0] if found else ""

    def test_down_is_allowed(self):
        for includer, included in (("src/zero/zero.cpp", "comm/shm/shm.h"),
                                   ("src/comm/shm/shm.h", "comm/base/base.h"),
                                   ("src/comm/base/base.h", "tessera/comm.h"),
                                   ("src/comm/base/base.h", "memory/heap.h"),
                                   ("include/tessera/zero.h", "tessera/comm.h"),
                                   ("src/train/run.cpp", "tessera/zero.h")):
            self.assertEqual(self.problem(includer, included), "")

    def test_up_and_sideways_are_not(self):
        for includer, included, why in (
                ("src/comm/base/base.h", "ddp/ddp.h", "above"),
                ("src/comm/base/base.h", "comm/shm/shm.h", "above"),
                ("src/comm/shm/shm.h", "comm/p2p/p2p.h", "beside"),
                ("src/zero/zero.cpp", "ddp/ddp.h", "beside"),
                ("src/memory/heap.h", "tessera/comm.h", "above"),
                ("src/comm/base/base.h", "optim/adam.h", "may include common, memory, not optim"),
                ("src/comm/top/top.h", "comm/p2p/p2p.h", "may include comm/base, not comm/p2p"),
                ("include/tessera/comm.h", "tessera/zero.h", "above"),
                ("include/tessera/zero.h", "ddp/ddp.h", "a public header"),
                ("src/train/run.cpp", "comm/shm/shm.h", "public headers only"),
                ("src/train/run.cpp", "no/such.h", "no such file")):
            self.assertIn(why, self.problem(includer, included), (includer, included))

    def test_cycles_are_found(self):
        files = collections.defaultdict(str)
        files["src/memory/heap.h"] = '#include "tessera/error.h"\n'
        self.assertEqual(Tree(LAYERS, self.FILES).cycle(files.__getitem__), [])
        files["include/tessera/error.h"] = '#include "memory/heap.h"\n'
        self.assertEqual(Tree(LAYERS, self.FILES).cycle(files.__getitem__),
                         ["include/tessera/error.h", "src/memory/heap.h",
                          "include/tessera/error.h"])

    def test_libtorch_is_found_through_other_files(self):
        files = collections.defaultdict(str)
        files["src/comm/shm/shm.h"] = '#include "comm/base/base.h"\n'
        small = Tree(LAYERS, self.FILES)
        self.assertEqual(small.with_libtorch(("comm",), files.__getitem__), [])
        files["src/comm/base/base.h"] = "#include <torch/torch.h>\n"
        self.assertEqual(small.with_libtorch(("comm", "zero"), files.__getitem__),
                         ["src/comm/base/base.h", "src/comm/shm/shm.h"])

    def test_a_wrong_table_is_refused(self):
        for wrong, text in (("2     memory", "9     memory"), ("error.h", "x.h"),
                            ("common memory", "elsewhere"), ("error.h", "")):
            text = LAYERS.replace(wrong, text)
            self.assertRaises(ValueError, Tree, text, self.FILES)


if __name__ == "__main__":
    unittest.main()
