#!/usr/bin/env python3
"""Runs clang-tidy 14 over the sources of src/ and cli/: exits with 1 if it finds something, with 77 if it is not installed.

    tidy.py BUILD_FOLDER [all]    all: also the folders that use libtorch, for some minutes

Clang reads neither GCC's precompiled headers nor the vectors of incomplete types in libtorch 1.13's headers with C++20. So it gets the text
of the former, and a vector whose functions are not constexpr.
"""
import concurrent.futures, json, os, pathlib, shlex, shutil, subprocess, sys, tempfile

BUILD, ALL = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:] == ["all"]
TIDY = "clang-tidy-14"
VECTOR = """#include <string>
#include <bits/stl_uninitialized.h>
#include <bits/range_access.h>
#pragma push_macro("_GLIBCXX20_CONSTEXPR")
#undef _GLIBCXX20_CONSTEXPR
#define _GLIBCXX20_CONSTEXPR
#include <bits/stl_vector.h>
#define __fill_a1 __fill_a1_of_bits
#include <bits/stl_bvector.h>
#undef __fill_a1
#include <bits/vector.tcc>
#pragma pop_macro("_GLIBCXX20_CONSTEXPR")
#include <vector>
"""


def commands(folder):
    """The compile commands for Clang, of the sources that are meant."""
    source = pathlib.Path(next(line for line in (BUILD / "CMakeCache.txt").read_text().splitlines()
                               if line.startswith("CMAKE_HOME_DIRECTORY")).split("=", 1)[1])
    (folder / "vector.h").write_text(VECTOR)
    found = {}
    for command in json.loads((BUILD / "compile_commands.json").read_text()):
        words = shlex.split(command["command"])
        path = pathlib.Path(command["file"])
        ours = any(path.is_relative_to(root / area) for root in (source, BUILD) for area in ("src", "cli"))
        tests = (BUILD / "tests") in (pathlib.Path(command["directory"]) / words[words.index("-o") + 1]).parents
        with_torch = any(word.endswith("torch/csrc/api/include") for word in words)
        if not ours or tests or path.name.startswith("cmake_pch") or (with_torch and not ALL):
            continue
        if "-include" in words:
            at = words.index("-include") + 1
            text = folder / f"headers-{len(found)}.h"
            shutil.copy(words[at], text)
            words[at:at + 1] = [str(folder / "vector.h"), "-include", str(text)]
        elif with_torch:
            words[1:1] = ["-include", str(folder / "vector.h")]
        gcc = ("-Winvalid-pch", "-fno-semantic-interposition", "-Wno-psabi", "-Werror")
        found[str(path)] = {**command, "command": shlex.join(word for word in words if word not in gcc)}
    (folder / "compile_commands.json").write_text(json.dumps(list(found.values())))
    return source, list(found)


def main():
    if not shutil.which(TIDY):
        print(f"{TIDY} is not installed")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as name:
        source, paths = commands(pathlib.Path(name))
        assert paths, "no source found"

        def check(path):
            done = subprocess.run([TIDY, "--quiet", "-p", name, f"--config-file={source}/.clang-tidy", f"--header-filter={source}/(src|include|cli)/.*", path],
                                  capture_output=True, text=True)
            return path, done.returncode, done.stdout + (done.stderr if done.returncode else "")

        bad = 0
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for path, code, text in pool.map(check, paths):
                bad += code != 0
                print(f"{path}: {'ok' if code == 0 else 'findings'}\n{text if code else ''}", end="", flush=True)
    print(f"{len(paths)} sources, {bad} with findings")
    sys.exit(bad != 0)


main()
