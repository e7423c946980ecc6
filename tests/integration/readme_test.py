#!/usr/bin/env python3
"""The README is correct: its C++ is part of a compiled example, and its commands and files exist."""
import pathlib, re, sys, textwrap, unittest

SOURCE = pathlib.Path(sys.argv.pop(1))
README = (SOURCE / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


class Readme(unittest.TestCase):
    def test_the_program_is_part_of_a_compiled_example(self):
        (snippet,) = blocks("cpp")
        self.assertIn(snippet, (SOURCE / "examples/zero_loop.cpp").read_text())

    def test_snippets_of_the_pages_are_compiled_and_run(self):
        tests = "".join((SOURCE / "tests" / name).read_text() for name in
                        ("join/documented_loops_test.cpp", "fsdp/documented_fsdp_test.cpp", "models/documented_data_test.cpp",
                         "zero/zero_share_parameters_test.cpp", "placements/wire_test.cpp",
                         "placements/master_weights_test.cpp"))
        compiled = "\n".join(textwrap.dedent(part) for part in re.findall(r"// \[documented\]\n(.*?) *// \[end\]\n", tests, re.S))
        found = 0
        for page in ("join.md", "distributed_optimizer.md", "fsdp.md", "memory.md", "data.md", "hosts.md"):
            for snippet in re.findall(r"```cpp\n(.*?)```", (SOURCE / "docs" / page).read_text(), re.S):
                self.assertIn(snippet, compiled, page)
                found += 1
        self.assertEqual(found, 12)

    def test_the_cmake_code_is_the_consumers(self):
        (snippet,) = blocks("cmake")
        consumer = (SOURCE / "tests/integration/consumer/CMakeLists.txt").read_text()
        for line in snippet.replace("your_program", "consumer").splitlines():
            self.assertIn(line, consumer)

    def test_commands_are_targets(self):
        makefile = (SOURCE / "Makefile").read_text()
        for target in re.findall(r"make (\w+)", README):
            self.assertRegex(makefile, rf"(?m)^{target}:", target)

    def test_pages_and_files_exist(self):
        found = re.findall(r"`((?:docs|examples|benchmarks)/[\w./]*|CONTRIBUTING\.md)`", README)
        found += re.findall(r"\]\(([\w./]+)\)", README)
        self.assertGreater(len(found), 40)
        for path in found:
            self.assertTrue((SOURCE / path).exists(), path)

    def test_the_table_of_what_is_supported_has_links_and_no_prose(self):
        rows = re.search(r"## What is supported\n\n\| \| \|\n\|---\|---\|\n(.*?)\n\n", README, re.S)[1].splitlines()
        self.assertGreater(len(rows), 10)
        for row in rows:
            name, text = row.strip("| ").split(" | ")
            self.assertIn("](docs/", name)
            self.assertLessEqual(len(re.findall(r"\w+", re.sub(r"\]\(.*?\)", "", text))), 25, row)


class Contributing(unittest.TestCase):
    PAGE = (SOURCE / "CONTRIBUTING.md").read_text()
    LISTS = "\n".join(path.read_text() for path in (SOURCE / "tests").glob("*/CMakeLists.txt"))
    PROGRAMS = set(re.findall(r"tessera_test\((\w+)", LISTS))
    ENTRIES = PROGRAMS | set(re.findall(r"(?:add_test\(NAME |tessera_add_test\()(\w+)", LISTS))

    def test_the_table_has_every_folder_and_every_program(self):
        (table,) = re.findall(r"(?ms)^\| folder \| programs and entries \|\n\|---\|---\|\n(.*?)\n\n", self.PAGE)
        rows = [line.split("|")[1:3] for line in table.splitlines()]
        folders = [name for folder, _ in rows for name in re.findall(r"`([\w/]+)`", folder)]
        self.assertEqual(sorted(folders), sorted(["cli", *(f"src/{path.name}" for path in (SOURCE / "src").iterdir() if path.is_dir())]))
        named = {name for _, entries in rows for name in re.findall(r"`(\w+)`", entries)}
        self.assertEqual(named - self.ENTRIES, set(), "no such entry")
        self.assertEqual(self.PROGRAMS - named, set(), "not in the table")

    def test_a_program_is_in_the_row_of_its_folder(self):
        for path in (SOURCE / "tests").glob("*/CMakeLists.txt"):
            row = re.search(rf"(?m)^\| `src/{path.parent.name}` \|.*$", self.PAGE)
            for program in re.findall(r"tessera_test\((\w+)", path.read_text()) if row else ():
                if path.parent.name != "train" or program != "test_config":
                    self.assertIn(f"`{program}`", row[0])

    def test_the_lines_of_the_inner_loop_are_right(self):
        (block,) = re.findall(r"## The inner loop\n\n```sh\n(.*?)```", self.PAGE, re.S)
        self.assertEqual(len(block.splitlines()), 6)
        self.assertIn('"name": "dev"', (SOURCE / "CMakePresets.json").read_text())
        for program in re.findall(r"--target (\w+)|\^(\w+)\$|bin/(\w+)", block):
            self.assertIn("".join(program), self.PROGRAMS)
        tests = "".join(path.read_text() for path in (SOURCE / "tests/zero").glob("*.cpp"))
        for suite in re.findall(r"gtest_filter='(\w+)\.", block):
            self.assertRegex(tests, rf"\b{suite}\b")
        self.assertIn(f'"{re.search("TESSERA_TEST_[A-Z]+", block)[0]}"', (SOURCE / "tests/device/seeds.h").read_text())


if __name__ == "__main__":
    unittest.main()
