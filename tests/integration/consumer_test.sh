#!/usr/bin/env bash
# Installs into an empty prefix, builds a project that uses only find_package(Tessera), and runs it on one
# and on two ranks.
set -euo pipefail
source=$1 build=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/prefix" >/dev/null
cmake -S "$source/tests/integration/consumer" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
cmake --build "$work/build"

last() { awk '/^step 100,/ { print $4 }'; }
alone=$("$work/build/consumer" | last)
export LD_LIBRARY_PATH=
two=$("$work/prefix/bin/tessera" run -n 2 "$work/build/consumer" | last)
echo "loss alone $alone, on two ranks $two"
awk -v a="$alone" -v b="$two" 'BEGIN { exit !(a != "" && b != "" && a < 50 && b < 50) }'
