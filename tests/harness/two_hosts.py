"""Two hosts, which are two network namespaces that a cable connects, and strangers that disturb them."""
import itertools, os, pathlib, re, shutil, signal, subprocess, time

ADDRESSES = ["192.0.2.1", "192.0.2.2"]  # TEST-NET-1
SECOND_ADDRESS = "192.0.2.9"  # of host 0
PREFIX = "tessera-hosts-"
NUMBERS = itertools.count()
NAME_SERVERS = set(re.findall(r"^nameserver ([\d.]+)$", pathlib.Path("/etc/resolv.conf").read_text(), re.M)) if os.path.exists("/etc/resolv.conf") else set()

# Keeps connections open, opens each again that is closed, and sends these bytes: ADDRESS PORT COUNT BYTES_IN_HEX
JUNK = """
import select, socket, sys, time
address, port, count, words = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
kept = {}
while True:
    while len(kept) < count:
        try:
            connection = socket.create_connection((address, port), 1)
            connection.sendall(words)
            kept[connection.fileno()] = connection
        except OSError:
            time.sleep(0.002)
            break
    for fd in kept and select.select(list(kept), [], [], 0.002)[0]:
        try:
            closed = not kept[fd].recv(1000)
        except OSError:
            closed = True
        if closed:
            kept.pop(fd).close()
"""


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def remove(name):
    """Removes the namespace with its cable, and kills the processes in it."""
    try:
        for pid in ip("netns", "pids", name).split():
            os.kill(int(pid), signal.SIGKILL)
        ip("netns", "del", name)
    except (OSError, ProcessLookupError):
        pass


def remove_left_over():
    """Removes the namespaces of earlier tests that were killed."""
    for line in ip("netns", "list").splitlines():
        found = re.match(rf"({PREFIX}(\d+)-\S+)", line)
        if found and not os.path.exists(f"/proc/{found[2]}"):
            remove(found[1])


class TwoHosts:
    """Makes both hosts. Raises OSError, and leaves nothing, if it cannot."""

    def __init__(self):
        own = f"{os.getpid()}-{next(NUMBERS)}"
        self.names = [f"{PREFIX}{own}-{host}" for host in range(2)]
        self.cables = [f"ts{own}-{host}" for host in range(2)]
        try:
            if not shutil.which("ip"):
                raise OSError("no ip command; it is in Debian's iproute2")
            remove_left_over()
            self.make()
        except OSError:
            self.remove()
            raise

    def make(self):
        names, cables = self.names, self.cables
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, end, address in zip(names, cables, ADDRESSES):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", address + "/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            for server in NAME_SERVERS:  # none answers: without this each look-up waits for 10 s
                ip("-n", name, "route", "add", "prohibit", server)
        for name, end in zip(names, cables):  # the kernel says it up to a second later
            until = time.monotonic() + 10
            while "state UP" not in ip("-n", name, "link", "show", "dev", end):
                if time.monotonic() > until:
                    raise OSError(f"{end} of {name} does not come up within 10 s")
                time.sleep(0.02)
        ip("-n", names[0], "address", "add", SECOND_ADDRESS + "/24", "dev", cables[0])
        ip("-n", names[0], "route", "add", "default", "via", ADDRESSES[1])

    def cut(self):
        """Pulls the cable."""
        ip("-n", self.names[0], "link", "set", self.cables[0], "down")

    def mend(self):
        """Puts the cable back."""
        ip("-n", self.names[0], "link", "set", self.cables[0], "up")

    def command(self, host, *words):
        return ["ip", "netns", "exec", self.names[host], *map(str, words)]

    def rsh_agent(self, folder):
        """A program in `folder` that mpirun calls in place of ssh. Each host has its namespace's name."""
        agent = pathlib.Path(folder) / "agent"
        names = " ".join(f"{address}) name={name};;" for address, name in zip(ADDRESSES, self.names))
        agent.write_text(f'#!/bin/sh\nwhile case $1 in -*) ;; *) false;; esac; do shift; done\ncase $1 in {names} esac\nshift\n'
                         'exec ip netns exec $name unshare --uts sh -c "hostname $name; $*"\n')
        agent.chmod(0o755)
        return agent

    def mpirun(self, *words):
        """The command on host 0 that has its namespace's name, for mpirun to know it from host 1."""
        return self.command(0, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.names[0], *words)

    def remove(self):
        for name in self.names:
            remove(name)
