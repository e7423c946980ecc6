#!/usr/bin/env bash
# Installs the packages of Debian 12 or 13 that are missing: install_dependencies.sh [build]. With
# `build` only those of the library and its programs, otherwise also those of the tests.
set -euo pipefail

packages=(
  g++ cmake ninja-build make git ca-certificates
  libtorch-dev libgloo-dev libopenblas-dev
  libyaml-cpp-dev nlohmann-json3-dev libcli11-dev libspdlog-dev libfmt-dev libxxhash-dev
  libssl-dev
)
case "${1:-tests}" in
  build) ;;
  tests)
    packages+=(
      libgtest-dev libgmock-dev libbenchmark-dev abigail-tools
      python3 python3-torch python3-numpy iproute2
      libopenmpi-dev openmpi-bin libmpich-dev mpich gfortran
    )
    # Other versions format and find other things. Debian 13 does not have them.
    [ "$(. /etc/os-release && echo "${VERSION_CODENAME:-}")" = trixie ] ||
      packages+=(clang-format-14 clang-tidy-14)
    ;;
  *)
    echo "install_dependencies: '$1' is neither build nor tests" >&2
    exit 2
    ;;
esac

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

echo "Installing ${#missing[@]} packages: ${missing[*]}"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || {
    echo "install_dependencies: run as root, or install: ${missing[*]}" >&2
    exit 1
  }
  as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
