#!/usr/bin/env bash
# Prints the programs of the tests with a label, as targets: programs_of_label.sh LABEL BUILD. The build
# folder is configured. Its programs need not be built.
set -euo pipefail
build=$(realpath "$2")
# Not built yet, they are known by the files of CTest alone.
ctest --test-dir "$build" -L "$1" --show-only=json-v1 | python3 -c '
import json, pathlib, re, sys
chosen = {test["name"] for test in json.load(sys.stdin)["tests"]}
files = "".join(path.read_text() for path in pathlib.Path(sys.argv[1]).rglob("CTestTestfile.cmake"))
found = re.findall(r"add_test\(\[?=?\[?(\w+)\]?=?\]? \"" + re.escape(sys.argv[1]) + r"/bin/(\w+)\"", files)
print(*sorted({program for name, program in found if name in chosen}))' "$build"
