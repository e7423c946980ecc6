"""Processes of a test: started, read line by line, found by rank, and ended by id."""
import json, os, pathlib, re, select, signal, subprocess, tempfile, threading, time

DROP = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "MASTER_", "TESSERA_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC")


def environment(**more):
    """This process's environment without what a launcher sets."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(DROP) and k != "OPENBLAS_CORETYPE"}
    env.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    env.update(more)
    return env


def kill(pid, number=signal.SIGKILL):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def is_running(pid):
    """Whether the process exists and is not only waiting for its parent."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def marked(mark):
    """Process ids and environments (as lists of NAME=VALUE) of the running processes that have `mark` in their environment."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            words = pathlib.Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words and is_running(int(entry)):
            found[int(entry)] = [word.decode(errors="replace") for word in words]
    return found


def ranks(mark, program):
    """Process ids by rank, of the running ranks of `program` with `mark` in their environment."""
    found = {}
    for pid, words in marked(mark).items():
        try:
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.path.basename(command[0]).decode() == program:
            found.update({int(word[5:]): pid for word in words if word.startswith("RANK=")})
    return found


class Server:
    """A program that runs each command in a forked process of its own (fork_server.h), so that libtorch starts once. Ends with this process."""

    def __init__(self, program, env):
        self.folder = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def call(self, *words, cwd, seconds=100):
        files = {name: f"{self.folder.name}/{name}" for name in ("out", "err")}
        self.process.stdin.write(json.dumps({"words": [str(word) for word in words], "folder": str(cwd), **files}) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            self.process.kill()
            raise AssertionError(f"{words} takes more than {seconds} s")
        code = int(self.process.stdout.readline() or -1)
        texts = (pathlib.Path(files[name]).read_text(errors="replace") for name in ("out", "err"))
        return subprocess.CompletedProcess(words, code, *texts)


class Run:
    """A launched world. Its output is read line by line with the time of arrival. A rank that prints "pid P of rank R" is ended with it."""

    def __init__(self, *command, env=None, **options):
        self.process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                        text=True, errors="replace", env=environment() if env is None else env, **options)
        self.lines, self.pids = [], {}
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))
            found = re.search(r"pid (\d+) of rank (\d+)", line)
            if found:
                self.pids[int(found[2])] = int(found[1])

    def wait_for(self, condition, seconds, event):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds} s: {event}\n" + self.text())
            time.sleep(0.01)

    def wait_for_line(self, pattern, seconds=150):
        self.wait_for(lambda: self.when(pattern) is not None or self.process.poll() is not None, seconds, pattern)
        if self.process.poll() is not None:
            self.reader.join(5)
        if self.when(pattern) is None:
            raise AssertionError(f"the run has ended without {pattern!r}\n" + self.text())

    def end(self, seconds=150):
        """Waits for the end; returns the exit code, 128 + the signal for a death by a signal."""
        code = self.process.wait(seconds)
        self.reader.join(5)
        return 128 - code if code < 0 else code

    def when(self, pattern):
        return next((at for at, line in list(self.lines) if re.search(pattern, line)), None)

    def text(self):
        return "\n".join(line for _, line in list(self.lines))

    def close(self):
        for pid in self.pids.values():
            kill(pid, signal.SIGCONT)
            kill(pid)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self.reader.join(5)
        self.process.stdout.close()
