#!/usr/bin/env bash
# Makes the Debian packages, installs them in a clean chroot, and runs the consumer test there: a
# project outside of the sources that finds Tessera with CMake and with pkg-config, on one and on two
# ranks.
#
#     scripts/test_packages.sh [BUILD]
#
# BUILD           the build folder, against the system's libtorch. Default: build.
# SUITE=NAME      the release of Debian. Default: that of this system, whose packages BUILD makes. For
#                 another one (trixie) they are built from the sources in the chroot.
# CHROOT=FOLDER   a chroot of that release to use, and to keep. Default: a new one, which is removed.
# QUICK=1         builds in the chroot without optimisation, and does not compress the packages.
# MIRROR=URL      where debootstrap gets Debian. Default: the first mirror of this system's apt.
#
# Needs root, debootstrap, the right to mount, and about 4 GB. Ends with 77 where one of them is
# missing, and says which.
set -euo pipefail
cd "$(dirname "$0")/.."
source=$PWD
own_suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
suite=${SUITE:-$own_suite}

NAME=test_packages
. scripts/chroot.sh
if [ "$suite" = "$own_suite" ]; then
  build=$(cd "${1:-build}" && pwd)
  command -v cpack >/dev/null || skip "no cpack (apt-get install cmake)"
  command -v dpkg-shlibdeps >/dev/null || skip "no dpkg-shlibdeps (apt-get install dpkg-dev)"
fi
make_chroot "$suite"

if [ "$suite" = "$own_suite" ]; then
  (cd "$work" && cpack --config "$build/CPackConfig.cmake" -B "$work/packages" >"$work/cpack.log" 2>&1) ||
    { cat "$work/cpack.log" >&2; exit 1; }
fi

rm -rf "$root/packages" "$root/consumer"
mkdir "$root/packages" "$root/consumer"
if [ "$suite" = "$own_suite" ]; then
  cp "$work"/packages/*.deb "$root/packages/"
else
  copy_sources
  cat >"$root/sources/make_packages.sh" <<'BUILD'
set -euo pipefail
export LC_ALL=C.UTF-8
rm -rf /build
cmake -S /sources -B /build -G Ninja -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_EXAMPLES=OFF \
  ${QUICK:+-DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O0} >/dev/null
cmake --build /build -j "$(nproc)"
cd /build && cpack -B /packages ${QUICK:+-D CPACK_DEBIAN_COMPRESSION_TYPE=none} >/dev/null
BUILD
  chroot "$root" env DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 bash -c '/sources/scripts/install_dependencies.sh build &&
    apt-get install -y -qq --no-install-recommends dpkg-dev file pkg-config >/dev/null' ||
    skip "Debian's packages could not be installed"
  done_with "Debian's packages"
  chroot "$root" env QUICK="${QUICK:-}" bash /sources/make_packages.sh
  done_with "build"
fi
ls -l "$root"/packages/*.deb
cp "$source/examples/zero_loop.cpp" "$root/consumer/"
sed 's|${CMAKE_CURRENT_LIST_DIR}/../../../examples/||' \
  "$source/tests/integration/consumer/CMakeLists.txt" >"$root/consumer/CMakeLists.txt"
cat >"$root/consumer/test.sh" <<'TEST'
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 OMP_NUM_THREADS=1
apt-get update -qq || true  # an install that lacks something fails below
# A clean system has nothing of the packages' before apt installs them.
apt-get purge -y -qq 'libtessera*' tessera >/dev/null 2>&1 || true
apt-get install -y -qq --no-install-recommends /packages/*.deb g++ cmake make pkg-config >/dev/null
cd /consumer
type=Release optimisation=-O2
[ -z "$QUICK" ] || type=None optimisation=-O0
last() { awk '/^step 100,/ { print $4 }'; }
check() { awk -v loss="$2" -v name="$1" 'BEGIN { print name ": loss " loss; exit !(loss != "" && loss < 50) }'; }
rm -rf build
cmake -S . -B build -DCMAKE_BUILD_TYPE=$type >/dev/null
cmake --build build >/dev/null
check "CMake, one rank" "$(build/consumer | last)"
check "CMake, two ranks" "$(tessera run -n 2 build/consumer | last)"
g++ $optimisation zero_loop.cpp -o by_pkg_config $(pkg-config --cflags --libs tessera)
check "pkg-config, two ranks" "$(tessera run -n 2 ./by_pkg_config | last)"
tessera train --config-reference >reference.md
grep -q "Reference of the config" reference.md
TEST
chroot "$root" env QUICK="${QUICK:-}" bash /consumer/test.sh
done_with "passed in a chroot of Debian $(cat "$root/etc/debian_version")"
