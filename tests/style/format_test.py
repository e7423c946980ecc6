#!/usr/bin/env python3
"""The form of the sources and of the documentation.

    format_test.py SOURCE          the test: C++ as clang-format 14 writes it, no line over 100
                                   characters in C++ or in the prose of Markdown
    format_test.py SOURCE --fix    what `make format` runs: formats the C++ sources in place
"""
import pathlib, re, shutil, subprocess, sys, unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tree

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
VERSION = 14  # Other versions format differently. Debian 12 has this one as clang-format-14.
COLUMNS = 100
CODE = tree.files(SOURCE, ("src", "include", "cli", "tests", "examples", "benchmarks"),
                  (".h", ".cpp", ".inc"))
MARKDOWN = tree.files(SOURCE, ("",), (".md",))

# A line that is one link or one URL, perhaps with a list marker or punctuation, cannot be broken.
UNBREAKABLE = re.compile(r"\s*([-*>]|\d+\.)?\s*"
                         r"(\[[^\]]*\]\(\S*\)|\[[^\]]*\]:\s*\S+|<?https?://\S+>?)[.,;:]?\s*")


def formatter():
    """The command of clang-format 14; None where it is not installed."""
    if shutil.which(f"clang-format-{VERSION}"):
        return f"clang-format-{VERSION}"
    if shutil.which("clang-format"):
        text = subprocess.run(["clang-format", "--version"], capture_output=True, text=True).stdout
        if re.search(rf"version {VERSION}\.", text):
            return "clang-format"
    return None


def run_formatter(*options):
    """Runs clang-format over all sources; returns what it prints on standard error."""
    command = formatter()
    if command is None:
        sys.exit(f"format: clang-format {VERSION} is not installed; expected the Debian package "
                 f"clang-format-{VERSION} (scripts/install_dependencies.sh installs it)")
    done = subprocess.run([command, *options, *CODE], cwd=SOURCE, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"format: {command} failed:\n{done.stderr}")
    return done.stderr


def long_code_lines(text):
    """Line numbers, from 1, and lengths in characters."""
    return [(number, len(line)) for number, line in enumerate(text.split("\n"), 1)
            if len(line) > COLUMNS]


def long_prose_lines(text):
    """The same for Markdown: tables, fenced code and unbreakable lines may be longer."""
    found, fence = [], None
    for number, line in enumerate(text.split("\n"), 1):
        marker = re.match(r"\s*(```+|~~~+)", line)
        if marker and fence is None:
            fence = marker[1]
        elif marker and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            fence = None
        elif (fence is None and len(line) > COLUMNS and not line.lstrip().startswith("|")
              and not UNBREAKABLE.fullmatch(line)):
            found.append((number, len(line)))
    return found


def report(names, long_lines):
    return [f"{name}:{number}: {length} characters, expected at most {COLUMNS}"
            for name in names for number, length in long_lines((SOURCE / name).read_text())]


class Format(unittest.TestCase):
    maxDiff = None

    def check(self, problems, remedy):
        if problems:
            self.fail("\n" + "\n".join(problems) + f"\n{remedy}")

    def test_sources_are_as_clang_format_writes_them(self):
        self.assertGreater(len(CODE), 100, "the list of sources is not complete")
        found = re.findall(r"^(\S+?:\d+):\d+: (?:error|warning):", run_formatter("--dry-run"), re.M)
        self.check([f"{place}: differs from clang-format {VERSION}" for place in
                    dict.fromkeys(found)], "Mend it with: make format")

    def test_no_source_line_is_too_long(self):
        self.check(report(CODE, long_code_lines),
                   "Run make format, then break what is left (texts, comments) by hand.")

    def test_no_line_of_prose_is_too_long(self):
        self.assertIn("README.md", MARKDOWN)
        self.check(report(MARKDOWN, long_prose_lines), "Break these lines by hand.")


class Rules(unittest.TestCase):
    """The rules above, on examples."""

    def test_characters_are_counted_not_bytes(self):
        self.assertEqual(long_code_lines("é" * 100 + "\n" + "é" * 101 + "\n"), [(2, 101)])

    def test_prose_is_measured(self):
        long = "word " * 21
        self.assertEqual(long_prose_lines("short\n" + long), [(2, 105)])
        self.assertEqual(long_prose_lines("- " + long), [(1, 107)])
        self.assertEqual(long_prose_lines("see https://example.org/" + "a" * 100), [(1, 124)])

    def test_tables_fences_and_links_are_exempt(self):
        long = "word " * 21
        self.assertEqual(long_prose_lines("| " + long + " |"), [])
        self.assertEqual(long_prose_lines("```\n" + long + "\n```\n"), [])
        self.assertEqual(long_prose_lines("````md\n```\n" + long + "\n```\n````\n"), [])
        self.assertEqual(long_prose_lines("```\ncode\n```\n" + long), [(4, 105)])
        self.assertEqual(long_prose_lines("- [text of the link](" + "a" * 100 + ")."), [])
        self.assertEqual(long_prose_lines("https://example.org/" + "a" * 100), [])


if __name__ == "__main__":
    if sys.argv[1:] == ["--fix"]:
        run_formatter("-i")
    else:
        unittest.main()
