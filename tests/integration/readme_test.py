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
                         "zero/zero_share_parameters_test.cpp", "placements/wire_test.cpp"))
        compiled = "\n".join(textwrap.dedent(part) for part in re.findall(r"// \[documented\]\n(.*?) *// \[end\]\n", tests, re.S))
        found = 0
        for page in ("join.md", "distributed_optimizer.md", "fsdp.md", "memory.md", "data.md", "hosts.md"):
            for snippet in re.findall(r"```cpp\n(.*?)```", (SOURCE / "docs" / page).read_text(), re.S):
                self.assertIn(snippet, compiled, page)
                found += 1
        self.assertEqual(found, 11)

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
        for path in re.findall(r"`((?:docs|examples|benchmarks)/[\w./]*|CONTRIBUTING\.md)`", README):
            self.assertTrue((SOURCE / path).exists(), path)


if __name__ == "__main__":
    unittest.main()
