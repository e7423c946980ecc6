#!/usr/bin/env bash
# Compares the ABI of libtessera with that of the last release, which has a tag v*, or of COMMIT:
# check_abi.sh [COMMIT]. Both are compiled with debug information, for some minutes each, in BUILD
# (default build-abi), which keeps the older one. Fails if a program that was linked with the older
# one may not run with this one, and both have the same SOVERSION.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${BUILD:-build-abi}
from=${1:-$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true)}
if [ -z "$from" ]; then
  echo "check_abi: there is no tag v* yet, so there is nothing to compare with"
  exit 0
fi
if ! commit=$(git rev-parse --verify --quiet "$from^{commit}"); then
  echo "check_abi: there is no '$from'; expected a tag or a commit" >&2
  exit 2
fi

library() { # library SOURCE BUILD
  cmake -S "$1" -B "$2" -G Ninja -DCMAKE_BUILD_TYPE=Debug \
    -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_EXAMPLES=OFF >/dev/null
  cmake --build "$2" -j "$(nproc)" --target tessera
}
soname() { readelf -d "$1/lib/libtessera.so" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p'; }

old=$build/$commit source=$build/$commit/source
forget() { git worktree remove --force "$source" 2>/dev/null || true; }
forget
trap forget EXIT
git worktree add --quiet --detach "$source" "$commit"
if [ ! -f "$old/complete" ]; then
  library "$source" "$old"
  touch "$old/complete"
fi
library . "$build/now"
# What is new breaks no program.
status=0
abidiff --no-added-syms --exported-interfaces-only --drop-private-types \
  --headers-dir1 "$source/include" --headers-dir2 include \
  "$old/lib/libtessera.so" "$build/now/lib/libtessera.so" || status=$?
if [ $((status & 3)) -ne 0 ]; then
  echo "check_abi: abidiff failed with status $status" >&2
  exit 1
fi
was=$(soname "$old") is=$(soname "$build/now")
if [ "$status" -eq 0 ]; then
  echo "check_abi: programs that were linked with $from run with this libtessera ($is)"
elif [ "$was" != "$is" ]; then
  echo "check_abi: the ABI has changed since $from, and so has SOVERSION: $was was, $is is"
else
  echo "check_abi: the ABI has changed since $from, and the library is still $is; expected a higher" >&2
  echo "TESSERA_SOVERSION in CMakeLists.txt (CONTRIBUTING.md, The ABI)" >&2
  exit 1
fi
