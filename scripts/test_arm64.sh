#!/usr/bin/env bash
# Compiles Tessera for aarch64 with Debian's cross compiler, against the libtorch of Debian's arm64
# packages. Then it runs the tests of a label and five steps of configs/demo.yaml on two ranks,
# under qemu-user.
#
#     scripts/test_arm64.sh [LABEL]
#
# LABEL           the label of the tests. Default: quick.
# BUILD=FOLDER    the build folder; its folder root/ has the packages. Default: build-arm64.
# MIRROR=URL      where apt gets the packages. Default: the first mirror of this system's apt.
#
# Needs root, g++-aarch64-linux-gnu, qemu-user-static, a Linux that runs aarch64's programs with it
# (since 6.7 each user namespace has its own list of such formats), and about 3 GB. Ends with 77
# where one of them is missing, and says which. The system's packages and formats stay as they are.
set -euo pipefail
cd "$(dirname "$0")/.."
label=${1:-quick}
build=$(realpath -m "${BUILD:-build-arm64}")
root=$build/root

NAME=test_arm64
. scripts/chroot.sh
for tool in aarch64-linux-gnu-g++:g++-aarch64-linux-gnu qemu-aarch64-static:qemu-user-static; do
  command -v "${tool%:*}" >/dev/null || skip "no ${tool%:*} (apt-get install ${tool#*:})"
done

# Runs a command whose programs, and those that they start, may be of aarch64. Where the system has
# no format for them, the command gets a user namespace with a list of its own, and all users.
formats=/proc/sys/fs/binfmt_misc
emulated() {
  local -x QEMU_LD_PREFIX=$root
  if [ -e $formats/qemu-aarch64 ]; then
    "$@"
    return
  fi
  FORMATS=$formats unshare --user --mount bash -euc '
    until [ -n "$(cat /proc/self/gid_map)" ]; do sleep 0.1; done
    mount -t binfmt_misc none "$FORMATS"
    cat /usr/lib/binfmt.d/qemu-aarch64.conf >"$FORMATS/register"
    exec "$@"' bash "$@" &
  local pid=$! users="0 0 4294967295"
  while kill -0 $pid && ! echo $users >/proc/$pid/uid_map; do sleep 0.1; done 2>/dev/null
  echo $users 2>/dev/null >/proc/$pid/gid_map || true
  wait $pid
}
[ "$(id -u)" -eq 0 ] || skip "a list of formats needs root"
emulated true ||
  skip "this Linux runs no programs of aarch64 (Linux 6.7, or apt-get install binfmt-support)"

# The packages of install_dependencies.sh and those that they need, unpacked and not installed. apt
# has a configuration, lists and a state of its own for this.
unpack_packages() {
  local apt=$build/apt mirror
  mirror=${MIRROR:-$(debian_mirror)}
  [ -n "$mirror" ] || skip "apt has no mirror of Debian: set MIRROR"
  rm -rf "$root"
  mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$root"/usr/{bin,sbin,lib}
  ln -s usr/bin usr/sbin usr/lib "$root"
  : >"$apt/status"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]" \
    "$mirror bookworm main" >"$apt/sources.list"
  cat >"$apt/apt.conf" <<APT
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::Languages "none";
Dir::State "$apt";
Dir::State::status "$apt/status";
Dir::Cache "$apt";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "-";
APT
  local packages
  packages=$(grep -oE '\b(lib[a-z0-9-]+|nlohmann-json3)-dev\b' scripts/install_dependencies.sh |
    grep -vE 'openmpi|mpich|benchmark')
  APT_CONFIG=$apt/apt.conf apt-get update -qq
  APT_CONFIG=$apt/apt.conf apt-get install -qq -y --download-only libc6-dev libstdc++-12-dev \
    $packages >/dev/null
  for package in "$apt"/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" |
      tar -x -C "$root" --keep-directory-symlink --exclude='./usr/share/[dfilm]*'
  done
  rm -r "$apt"
  find "$root" -type l -lname '/*' | while read -r link; do
    ln -sfnr "$root$(readlink "$link")" "$link"
  done
  # Debian's alternatives are set when a package is installed.
  ln -s openblas-pthread/lib{blas,lapack}.so.3 openblas-pthread/libopenblas.so.0 \
    "$root/usr/lib/aarch64-linux-gnu"
  touch "$root/complete"
}
if [ ! -e "$root/complete" ]; then
  unpack_packages
fi

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_BUILD_EXAMPLES=OFF \
  -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64.cmake" -DTESSERA_SYSROOT="$root"
programs=$(scripts/programs_of_label.sh "$label" "$build")
cmake --build "$build" -j "$(nproc)" --target tessera_cli tessera_train_cli $programs

# What cannot run under qemu: it says that madvise(MADV_REMOVE) has succeeded and does nothing, so
# memory is not returned; and what must take less than 5 s takes longer.
lacking=BucketMemory.AGradientThatMovesIsInMemoryOnce:ConfigTest.HostileFilesAreRefusedAtOnce
echo "test_arm64: not run under qemu: $lacking"
# Each test has four times its limit of time.
cores=$(nproc)  # which is OMP_NUM_THREADS where that is set
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
emulated env "GTEST_FILTER=-$lacking" ctest --test-dir "$build" -L "$label" -j "$cores" \
  --output-on-failure
# The evaluation and the sample at the end would take longer than the steps.
emulated "$build/bin/tessera" train -n 2 configs/demo.yaml train.steps=5 train.log_every=1 \
  data.val_fraction=0.005 train.sample=null "train.log=$build/demo/log.jsonl" \
  "train.save=$build/demo/model.safetensors" --no-resume
