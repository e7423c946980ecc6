"""What containers do to a process: system calls that are refused, namespaces, another user, a root that cannot be written, a small /dev/shm."""
import ctypes, shlex, struct, subprocess

# Numbers on x86_64, and the argument that is compared, with its value.
MADV_COLLAPSE = 25
CALLS = {"memfd_create": (319, None), "pidfd_open": (434, None), "signalfd4": (289, None), "process_vm_readv": (310, None),
         "madvise_collapse": (28, (2, MADV_COLLAPSE)), "mbind": (237, None), "io_uring_setup": (425, None), "close_range": (436, None)}

NOBODY = 65534


def refuse(names, error):
    """Installs a seccomp filter in this process: the calls fail with `error`."""
    load, equal, give = 0x20, 0x15, 0x06
    allowed, refused, arch = 0x7FFF0000, 0x00050000 | error, 0xC000003E
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, allowed)]
    for name in names:
        number, argument = CALLS[name]
        program.append((load, 0, 0, 0))
        if argument is None:
            program += [(equal, 0, 1, number), (give, 0, 0, refused)]
        else:
            program += [(equal, 0, 3, number), (load, 0, 0, 16 + 8 * argument[0]), (equal, 0, 1, argument[1]), (give, 0, 0, refused)]
    program.append((give, 0, 0, allowed))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    filter_ = Program(len(program), ctypes.addressof(code))
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, ctypes.byref(filter_), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def in_mounts(*commands):
    """The words before a command that run it in a mount namespace of its own after these shell commands."""
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join([*commands, 'exec "$@"']), "sh"]


def surroundings(folder):
    """By name: the words before a command that run it there. `folder` is the only one that the command writes to."""
    folder = shlex.quote(str(folder))
    return {
        "a pid namespace": ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"],
        "a user namespace": ["unshare", "--user", "--map-root-user"],
        "an ipc namespace": ["unshare", "--ipc"],
        "another user": ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"],
        "a read-only root": in_mounts(f"mount --bind {folder} {folder}", f"cd {folder}", "mount -o remount,bind,ro /",
                                      "mount -o remount,bind,ro /dev/shm"),
        "64 KiB of /dev/shm": in_mounts("mount -t tmpfs -o size=64k none /dev/shm"),
    }


def why_not(front, *command):
    """Why a command cannot be run behind these words here; None: it can."""
    try:
        done = subprocess.run([*front, *(command or ["true"])], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else f"{shlex.join(front[:3])}: {done.stderr.strip() or done.returncode}"
