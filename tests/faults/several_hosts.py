"""Worlds on two hosts, which are network namespaces: strangers at the port, secrets, lost ranks, a cut cable."""
import re, signal, sys, time

from registry import CannotTry, fault
from trial import AT, TIMEOUT, hook, outcome, parallel
from two_hosts import ADDRESSES, JUNK, SECOND_ADDRESS, TwoHosts

GROUP = "Several hosts"
PORT = 29771


def hosts_of(trial):
    try:
        hosts = TwoHosts()
    except OSError as error:
        raise CannotTry(f"two network namespaces cannot be made: {error}")
    trial.cleanups.append(hosts.remove)
    return hosts


def launch(trial, hosts, host, *words, secret="shared by all hosts", ranks=1):
    """The launcher of one host. Host 0 has the folder's own files; the run saves nothing."""
    secret = [] if secret is None else [f"TESSERA_SECRET={secret}"]
    return trial.start(*hosts.command(host, "env", *secret, trial.bin("tessera"), "run", "--nnodes", 2, "--node-rank", host, "-n", ranks, "--master-addr", ADDRESSES[0],
                                      "--master-port", PORT, trial.bin("fault_trainer"), "c.yaml", "checkpoint=null", "train.save=null", "train.log=null",
                                      *words))


def both(trial, hosts, *words, **how):
    return [launch(trial, hosts, host, *words, **how) for host in range(2)]


@fault(GROUP, "before and during the start: {what}", cases=[dict(what=what, count=count, words=words) for what, count, words in (
    ("one connection that sends a byte 00 and stays open", 1, "00"), ("300 silent connections", 300, ""),
    ("50 connections that send an HTTP request", 50, b"GET / HTTP/1.1\r\n\r\n".hex()), ("20 connections that send a huge length", 20, "ff" * 64))])
def junk(trial, what, count, words):
    hosts = hosts_of(trial)
    trial.start(*hosts.command(1, sys.executable, "-c", JUNK, ADDRESSES[0], PORT, count, words))
    time.sleep(0.3)
    runs = both(trial, hosts)
    codes = [run.end() for run in runs]
    trial.check(codes == [0, 0], f"exit codes {codes}", runs[0])
    trial.runs[0].close()
    return outcome("not a fault", "none", 0, "the world starts and trains")


@fault(GROUP, "{what}", cases=[dict(what=what, near=near, far=far) for what, near, far in (
    ("a host with another secret", "secret number one", "secret number two"), ("a host without a secret", "secret number one", None), ("a secret on the far host alone", None, "secret number two"))])
def secrets(trial, what, near, far):
    hosts = hosts_of(trial)
    runs = [launch(trial, hosts, 0, secret=near), launch(trial, hosts, 1, secret=far)]
    code = runs[1].end()
    trial.check(0 < code < 128, f"exit code {code}", runs[1])
    ranks = trial.named(runs[1], r"(rank \d) on host \S+: .*TESSERA_SECRET")
    runs[0].wait_for_line(r"refused a connection from .* it calls itself rank 1 .*TESSERA_SECRET")
    trial.check(runs[0].process.poll() is None, "rank 0 waits on", runs[0])
    runs[0].process.send_signal(signal.SIGTERM)
    runs[0].end()
    return outcome(trial.before_training(runs[1]), ranks, code, "rank 0 names the stranger and waits on")


@fault(GROUP, "a connection to another address of host 0")
def other_address(trial):
    hosts = hosts_of(trial)
    runs = both(trial, hosts, "train.steps=1000000")
    runs[0].wait_for_line("step +3/")
    ask = "import socket, sys\ntry: socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)\nexcept OSError as e: print(e.strerror)\nelse: print('yes')"
    answers = []
    for address in (ADDRESSES[0], SECOND_ADDRESS):
        run = trial.start(*hosts.command(1, sys.executable, "-c", ask, address, PORT))
        run.end()
        answers.append(run.text())
    trial.check(answers == ["yes", "Connection refused"], str(answers))
    runs[0].process.send_signal(signal.SIGTERM)
    codes = [run.end() for run in runs]
    trial.check(codes == [143, 143], f"exit codes {codes}", runs[1])
    return outcome("at once", "none", "143 when asked to stop", "refused; the world trains")


@fault(GROUP, "SIGKILL of the rank on {where}", cases=[dict(where="the far host", victim=1), dict(where="the host of the store", victim=0)])
def killed(trial, where, victim):
    hosts = hosts_of(trial)
    runs = both(trial, hosts, hook(do="signal", value=9, at=AT, rank=victim))
    codes = [run.end() for run in runs]
    trial.check(codes[victim] == 137 and 0 < codes[1 - victim] < 128, f"exit codes {codes}", runs[1 - victim])
    near, far = runs[victim], runs[1 - victim]
    trial.check(trial.named(near, r"root cause: rank (\d)") == [victim] and "root cause" not in far.text(), "who is blamed", far)
    ranks = trial.named(far, r"the failure began on rank (\d), which is on another host")
    return outcome(far.when("BrokenWorldError") - trial.fault_at(near), ranks, f"137; {codes[1 - victim]} on the other host", "nothing")


@fault(GROUP, "SIGTERM to the launcher of one host")
def stopped(trial):
    hosts = hosts_of(trial)
    runs = both(trial, hosts, "train.steps=1000000")
    runs[0].wait_for_line("step +3/")
    start = time.monotonic()
    runs[0].process.send_signal(signal.SIGTERM)
    codes = [run.end() for run in runs]
    trial.check(codes == [143, 143], f"exit codes {codes}", runs[1])
    trial.check(not re.search("cause|first failure", runs[1].text()), "a stop is no failure", runs[1])
    return outcome(runs[1].when("SIGTERM on another host stopped the program") - start, "none", 143, "both hosts end after the same step")


@fault(GROUP, "the cable between the hosts is cut")
def cut(trial):
    hosts = hosts_of(trial)
    runs = both(trial, hosts, hook(do="none", time_out=int(1000 * TIMEOUT)), "train.steps=1000000")
    runs[0].wait_for_line("step +3/")
    start = time.monotonic()
    hosts.cut()
    codes = [run.end() for run in runs]
    trial.check(all(0 < code < 128 for code in codes), f"exit codes {codes}", runs[0])
    for host, run in enumerate(runs):
        trial.check(trial.named(run, r"rank (\d) did not arrive within") == [1 - host], "each host names the other's rank", run)
        late = run.when("BrokenWorldError") - start
        trial.check(late < TIMEOUT + 2 + 1, f"found after {late:.1f} s", run)
    return outcome(f"time-out ({TIMEOUT} s)", "1 on host 0, 0 on host 1", codes[0], "nothing")


# Two ranks on each host: shared memory within a host, messages between hosts.


@fault(GROUP, "two ranks on each host, {wrapper}: SIGKILL of rank {victim}", fast=True,
       cases=[dict(wrapper=wrapper, victim=victim) for wrapper, victim in (("ZeRO", 0), ("ZeRO", 3), ("DDP", 1), ("FSDP", 2))])
def killed_beside_another(trial, wrapper, victim):
    hosts = hosts_of(trial)
    runs = both(trial, hosts, parallel(wrapper), hook(do="signal", value=9, at=AT, rank=victim), ranks=2)
    codes = [run.end() for run in runs]
    near, far = runs[victim // 2], runs[1 - victim // 2]
    trial.check(codes[victim // 2] == 137 and 0 < codes[1 - victim // 2] < 128, f"exit codes {codes}", far)
    trial.check(trial.named(near, r"root cause: rank (\d)") == [victim] and "root cause" not in far.text(), "who is blamed", far)
    ranks = trial.named(far, r"the failure began on ranks? ([\d, ]+?),? which")
    trial.check(ranks == [victim], f"the other host blames {ranks}", far)
    return outcome(far.when("BrokenWorldError") - trial.fault_at(near), ranks, f"137; {codes[1 - victim // 2]} on the other host", "nothing")


@fault(GROUP, "two ranks on each host, {wrapper}: SIGSTOP of rank {victim}", fast=True,
       cases=[dict(wrapper="ZeRO", victim=3), dict(wrapper="FSDP", victim=0), dict(wrapper="DDP", victim=2)])
def stopped_beside_another(trial, wrapper, victim):
    hosts = hosts_of(trial)
    runs = both(trial, hosts, parallel(wrapper), hook(do="signal", value=int(signal.SIGSTOP), at=AT, rank=victim, time_out=int(1000 * TIMEOUT)), ranks=2)
    codes = [run.end() for run in runs]
    near, far = runs[victim // 2], runs[1 - victim // 2]
    trial.check(codes[victim // 2] == 128 + signal.SIGSTOP and 0 < codes[1 - victim // 2] < 128, f"exit codes {codes}", far)
    for run in runs:
        late = run.when("BrokenWorldError") - trial.fault_at(near)
        trial.check(late < TIMEOUT + 2, f"found after {late:.1f} s", run)
    trial.check(trial.named(near, r"root cause: rank (\d) \(pid \d+\) is stopped \(SIGSTOP\)") == [victim], "who is blamed", near)
    ranks = trial.named(far, r"the failure began on ranks? ([\d, ]+?),? which")
    trial.check(ranks == [victim], f"the other host blames {ranks}", far)
    return outcome(f"time-out ({TIMEOUT} s)", ranks, f"{128 + signal.SIGSTOP}; {codes[1 - victim // 2]} on the other host", "nothing")


@fault(GROUP, "two ranks on each host: the cable between the hosts is cut")
def cut_beside_another(trial):
    hosts = hosts_of(trial)
    runs = both(trial, hosts, hook(do="none", time_out=int(1000 * TIMEOUT)), "train.steps=1000000", ranks=2)
    runs[0].wait_for_line("step +3/")
    start = time.monotonic()
    hosts.cut()
    codes = [run.end() for run in runs]
    trial.check(all(0 < code < 128 for code in codes), f"exit codes {codes}", runs[0])
    for host, run in enumerate(runs):
        blamed = trial.named(run, r"gave up in [^:]*: ranks? (\d(?: and \d)?) ")
        trial.check(set(blamed) <= {2 - 2 * host, 3 - 2 * host}, f"host {host} blames {blamed}", run)
        late = run.when("BrokenWorldError") - start
        trial.check(late < TIMEOUT + 2 + 1, f"found after {late:.1f} s", run)
    return outcome(f"time-out ({TIMEOUT} s)", "2, 3 on host 0, 0, 1 on host 1", codes[0], "nothing")


@fault(GROUP, "two ranks on each host: the cable is away for less than the time-out")
def cut_for_a_while(trial):
    hosts = hosts_of(trial)
    runs = both(trial, hosts, hook(do="none", time_out=20000), "train.steps=1000000", ranks=2)
    runs[0].wait_for_line("step +3/")
    hosts.cut()
    time.sleep(3)
    hosts.mend()
    since = time.monotonic()
    runs[0].wait_for(lambda: runs[0].process.poll() is not None or runs[0].lines[-1][0] > since + 2, 20, "steps after the pause")
    runs[0].process.send_signal(signal.SIGTERM)
    codes = [run.end() for run in runs]
    trial.check(codes == [143, 143] and "BrokenWorldError" not in runs[0].text(), f"exit codes {codes}", runs[0])
    return outcome("not a fault", "none", 143, "costs time; the run goes on")


REJOIN = 4  # --rejoin-timeout


def launch_rounds(trial, hosts, host, *words, nnodes="1:2"):
    """The launcher of one host, with one rank, which may start again with the others. Both hosts share the folder."""
    return trial.start(*hosts.command(host, "env", "TESSERA_SECRET=shared by all hosts", trial.bin("tessera"), "run", "--nnodes", nnodes, "--node-rank", host,
                                      "--master-addr", ADDRESSES[0], "--master-port", PORT + 1, "--max-restarts", 3, "--restart-delay", 0.2,
                                      "--rejoin-timeout", REJOIN, trial.bin("fault_trainer"), "c.yaml", *words))


@fault(GROUP, "SIGKILL of the rank on node {victim} under --max-restarts", cases=[dict(victim=victim) for victim in range(2)])
def restarted(trial, victim):
    hosts = hosts_of(trial)
    runs = [launch_rounds(trial, hosts, host, hook(do="signal", value=9, at=AT, rank=victim, once=trial.folder / "once"), nnodes="2") for host in range(2)]
    codes = [run.end() for run in runs]
    trial.check(codes == [0, 0], f"exit codes {codes}", runs[victim])
    far = runs[1 - victim]
    ranks = trial.named(far, r"restart 1 of 3, because rank (\d) \(pid \d+\) was killed by SIGKILL")
    seconds = runs[victim].when("was killed by SIGKILL") - trial.fault_at(runs[victim])
    trial.check(trial.weights() == trial.reference(ranks=2), "training gives other bits", far)
    return outcome(seconds, ranks, 0, f"{trial.left()}; the same bits as undisturbed")


@fault(GROUP, "SIGKILL of the launcher on node {victim} under --nnodes 1:2 --rejoin-timeout 4", cases=[dict(victim=victim) for victim in range(2)])
def launcher_lost(trial, victim):
    hosts = hosts_of(trial)
    runs = [launch_rounds(trial, hosts, host, "train.steps=1000000") for host in range(2)]
    runs[0].wait_for_line("step +6/")  # after the first checkpoint
    start = time.monotonic()
    runs[victim].process.kill()
    if victim == 0:
        code = runs[1].end(30)
        trial.check(code == 1, f"exit code {code}", runs[1])
        return outcome(runs[1].when("lost node 0 at .*its launcher has ended") - start, "none", code, "the others end: node 0 is needed")
    runs[0].wait_for_line("round 1: 1 host, node 0; without node 1")
    late = runs[0].when("round 1: ") - start
    trial.check(late < REJOIN + 2 + 2, f"{late:.1f} s", runs[0])
    runs[0].wait_for_line("resuming from")
    runs[0].process.send_signal(signal.SIGTERM)
    code = runs[0].end()
    return outcome(f"--rejoin-timeout ({REJOIN} s)", "none", f"{code} when asked to stop", "node 0 goes on alone from the last checkpoint")
