# For scripts that work in a chroot of Debian, or with packages of another one; they source it.
#   NAME      the script's name, for its messages.
#   make_chroot SUITE
#             sets `work`, a new folder that is removed at the end, and `root`: a chroot of that
#             release in $CHROOT, which is kept, else in `work`. Ends with status 77 and the reason
#             where that cannot be done: it needs root, debootstrap and the right to mount.
#   copy_sources
#             copies the sources, without build folders, to /sources of the chroot.
# CHROOT=FOLDER, MIRROR=URL: see the scripts.
skip() {
  echo "$NAME: not run: $1" >&2
  exit 77
}

done_with() { echo "$NAME: $1, after $SECONDS s"; }

# The first mirror of this system's apt; nothing if it has none.
debian_mirror() {
  sed -nE 's/^(URIs:|deb( \[[^]]*\])?) *(https?:[^ ]*debian\/?)( .*)?$/\3/p' \
    /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | head -n 1 || true
}

leave_chroot() {
  # Lazily: after a signal, programs in the chroot may still be about to end.
  for mounted in proc dev/shm dev/pts sys; do
    mountpoint -q "$root/$mounted" && umount -l "$root/$mounted"
  done
  mountpoint -q "$root" && umount -l "$root"
  rm -rf --one-file-system "$work"
}

make_chroot() {
  local suite=$1 mirror host
  [ "$(id -u)" -eq 0 ] || skip "a chroot needs root"
  [ -n "${CHROOT:-}" ] || command -v debootstrap >/dev/null ||
    skip "no debootstrap (apt-get install debootstrap)"
  work=$(mktemp -d)
  root=${CHROOT:-$work/root}
  trap leave_chroot EXIT
  if [ ! -x "$root/usr/bin/apt-get" ]; then
    mirror=${MIRROR:-$(debian_mirror)}
    mkdir -p "$root"
    debootstrap --variant=minbase "$suite" "$root" ${mirror:+"$mirror"} >"$work/debootstrap.log" 2>&1 ||
      { tail -n 5 "$work/debootstrap.log" >&2; skip "debootstrap failed"; }
    # dpkg need not wait for the disk, and nothing here reads documentation.
    printf '%s\n' force-unsafe-io 'path-exclude=/usr/share/doc/*' 'path-exclude=/usr/share/man/*' \
      >"$root/etc/dpkg/dpkg.cfg.d/tessera"
  fi
  # Tests change how mounts below / propagate, so / is one, and look up names of the host.
  mount --bind "$root" "$root" 2>/dev/null || skip "mounting is not allowed here"
  for host in "127.0.0.1 localhost" "127.0.1.1 $(hostname)"; do
    grep -qsx "$host" "$root/etc/hosts" || echo "$host" >>"$root/etc/hosts"
  done
  mkdir -p "$root/dev/shm" "$root/dev/pts"
  mount -t proc proc "$root/proc"
  mount -t sysfs sysfs "$root/sys"
  mount -t tmpfs tmpfs "$root/dev/shm"
  mount -t devpts devpts "$root/dev/pts" -o newinstance,ptmxmode=0666
  done_with "debootstrap"
}

copy_sources() {
  mkdir -p "$root/sources"
  # What is built there stays.
  find "$root/sources" -mindepth 1 -maxdepth 1 ! -name 'build*' -exec rm -rf {} +
  tar --exclude='./build*' --exclude=./.git --exclude='__pycache__' -cf - . | tar -C "$root/sources" -xf -
}
