"""The files of the source tree, for the tests of its style."""
import os, pathlib, subprocess


def _tracked(source):
    """Paths that git tracks, or None where this is not a git checkout (a source archive)."""
    if not (source / ".git").exists():
        return None
    try:
        # safe.directory: the checkout may belong to another user, as in a container.
        command = ["git", "-c", "safe.directory=*", "-C", str(source), "ls-files", "-z"]
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return [name for name in listed.decode().split("\0") if name and (source / name).is_file()]


def _walked(source):
    """Every path below `source` except hidden folders and build folders."""
    found = []
    for folder, folders, names in os.walk(source):
        folders[:] = [name for name in folders
                      if not name.startswith((".", "build"))
                      and not (pathlib.Path(folder) / name / "CMakeCache.txt").exists()]
        found += [(pathlib.Path(folder) / name).relative_to(source).as_posix() for name in names]
    return found


def files(source, folders, suffixes):
    """Sorted paths, relative to `source`, in one of `folders` ("" is the whole tree)."""
    tracked = _tracked(source)
    return sorted(name for name in (_walked(source) if tracked is None else tracked)
                  if name.endswith(suffixes)
                  and any(not folder or name.startswith(folder + "/") for folder in folders))
