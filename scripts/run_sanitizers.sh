#!/usr/bin/env bash
# Builds and runs the tests with a label under sanitizers: run_sanitizers.sh [LABEL [PRESET]]. Default:
# quick, under the address and undefined sanitizers, then under the thread sanitizer. Only the programs
# of these tests are built.
set -euo pipefail
cd "$(dirname "$0")/.."
label=${1:-quick}
for preset in ${2:-asan tsan}; do
  cmake --preset "$preset"
  # Not built yet, they are known by the files of CTest alone.
  programs=$(ctest --preset "$preset" -L "$label" --show-only=json-v1 | python3 -c '
import json, pathlib, re, sys
chosen = {test["name"] for test in json.load(sys.stdin)["tests"]}
files = "".join(path.read_text() for path in pathlib.Path(sys.argv[1]).rglob("CTestTestfile.cmake"))
found = re.findall(r"add_test\(\[?=?\[?(\w+)\]?=?\]? \"" + re.escape(sys.argv[1]) + r"/bin/(\w+)\"", files)
print(*sorted({program for name, program in found if name in chosen}))' "$PWD/build-$preset")
  cmake --build --preset "$preset" -j "$(nproc)" --target $programs
  ctest --preset "$preset" -L "$label" -j $((2 * $(nproc)))
done
