#!/usr/bin/env bash
# Builds the sources and runs all tests in a chroot of Debian 13, with libtorch 2.6 and GCC 14.
#
#     scripts/test_debian13.sh [CTEST_OPTION…]
#
# CHROOT=FOLDER   a chroot of Debian 13 to use, and to keep with its build. Default: a new one, which is
#                 removed.
# MIRROR=URL      where debootstrap gets Debian. Default: the first mirror of this system's apt.
#
# Needs root, debootstrap, the right to mount, and about 6 GB. Ends with 77 where one of them is missing,
# and says which. Not run there: `format` and `tidy`, whose version 14 Debian 13 does not have.
set -euo pipefail
cd "$(dirname "$0")/.."
NAME=test_debian13
. scripts/chroot.sh
make_chroot trixie
copy_sources
in_chroot() { chroot "$root" env -C /sources DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 "$@"; }
in_chroot scripts/install_dependencies.sh || skip "Debian's packages could not be installed"
done_with "Debian's packages"
in_chroot make build
done_with "build"
in_chroot scripts/run_tests.sh build -E '^(format|tidy)$' "$@"
done_with "passed on Debian $(cat "$root/etc/debian_version")"
