#!/usr/bin/env python3
"""The names in the column "Tessera" of docs/coming_from.md exist.

    names_test.py SOURCE

`section.key` and `section.key: value` must be in docs/config_reference.md, the flags of
`tessera run --flag` in the launcher, and each word of other code in include/ or the config
reference."""
import pathlib, re, sys, unittest

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
PAGE = (SOURCE / "docs/coming_from.md").read_text()
REFERENCE = (SOURCE / "docs/config_reference.md").read_text()


def text_of(folder):
    files = sorted((SOURCE / folder).rglob("*"))
    return "\n".join(f.read_text() for f in files if f.suffix in (".h", ".cpp"))


HEADERS, LAUNCHER = text_of("include"), text_of("src/launch") + text_of("cli")
WORDS = set(re.findall(r"\w+", HEADERS)) | set(re.findall(r"\w+", REFERENCE))
SECTIONS = dict(re.findall(r"(?ms)^## (\S+)\n(.*?)(?=^## |\Z)", REFERENCE))


def rows(page):
    """The cells of the tables."""
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def problem(code):
    """What is wrong with a name of ours; "": nothing."""
    if code.startswith("tessera run"):
        missing = [flag for flag in code.split()[2:] if flag not in LAUNCHER]
        return f"no flag {missing[0]}" if missing else ""
    section, _, key = code.partition(": ")[0].partition(".")
    if section in SECTIONS and key:
        found = re.search(rf"(?m)^\| `{re.escape(key)}[`.]", SECTIONS[section])
        if not found:
            return f"no key {key} in section {section}"
    missing = [word for word in re.findall(r"[A-Za-z_]\w+", code) if word not in WORDS]
    return f"no {missing[0]} in include/ or the reference" if missing else ""


class Names(unittest.TestCase):
    def test_our_names_exist(self):
        found, names = [], 0
        for cells in rows(PAGE):
            if len(cells) < 2 or cells[1] in ("Tessera", "none"):
                continue
            codes = re.findall(r"`([^`]+)`", cells[1])
            if not codes:
                found.append(f"{cells[0]}: no name of ours, expected one or none")
            names += len(codes)
            found += [f"{code}: {problem(code)}" for code in codes if problem(code)]
        self.assertGreater(names, 150)
        self.assertEqual(found, [])

    def test_a_wrong_name_is_noticed(self):
        for code in ("wrap_by_sise", "train.acumulation", "tessera run --max-restart-s",
                     "parallel.type: FullySharded"):
            self.assertNotEqual(problem(code), "", code)


if __name__ == "__main__":
    unittest.main()
