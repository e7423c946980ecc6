"""Ranks that are killed, stopped, late, or end by themselves; and signals that ask a run to stop."""
import os, random, re, signal, time

from registry import fault
from trial import AT, TIMEOUT, WRAPPERS, hook, outcome, parallel

GROUP = "Processes and signals"
MS = int(1000 * TIMEOUT)
SURVIVOR = r"BrokenWorldError: .* rank (\d+) (?:has died|has left|is gone)"


@fault(GROUP, "SIGKILL of each of 3 ranks: {wrapper} over {backend}", bound=600,
       cases=[dict(wrapper=wrapper, backend=backend) for wrapper in WRAPPERS for backend in ("shm", "tcp")])
def killed(trial, wrapper, backend):
    slowest, ranks, codes = 0, [], set()
    for victim in range(3):
        run = trial.train(parallel(wrapper, backend), hook(do="signal", value=9, at=AT, rank=victim), "checkpoint.resume=false", code=137)
        launcher = trial.named(run, r"root cause: rank (\d+) \(pid \d+\) was killed by SIGKILL")
        trial.check(launcher == [victim] and trial.named(run, SURVIVOR) == [victim], f"named {launcher}, killed {victim}", run)
        trial.check(run.text().count("BrokenWorldError") >= 2, "each survivor reports", run)
        slowest = max(slowest, run.when("was killed by SIGKILL") - trial.fault_at(run))
        ranks += launcher
        codes.add(137)
    return outcome(slowest, ranks, *codes, trial.resumes(parallel(wrapper, backend)))


@fault(GROUP, "SIGSTOP of a rank: {wrapper} over {backend}",
       cases=[dict(wrapper="ZeRO", backend="shm"), dict(wrapper="FSDP", backend="shm"), dict(wrapper="DDP", backend="tcp")])
def stopped(trial, wrapper, backend):
    run = trial.train(parallel(wrapper, backend), hook(do="signal", value=int(signal.SIGSTOP), at=AT, rank=1, time_out=MS), code=128 + signal.SIGSTOP)
    late = run.when("BrokenWorldError") - trial.fault_at(run)
    trial.check(TIMEOUT * 0.9 < late < TIMEOUT + 2, f"found after {late:.1f} s", run)
    first = [line for _, line in run.lines if "BrokenWorldError" in line][0]
    trial.check("rank 1 " in first.partition("gave up")[2], first, run)
    launcher = trial.named(run, r"root cause: rank (\d) \(pid \d+\) is stopped \(SIGSTOP\)")
    return outcome(f"time-out ({TIMEOUT} s)", launcher, 128 + signal.SIGSTOP, trial.resumes(parallel(wrapper, backend)))


@fault(GROUP, "SIGSTOP of a rank that writes a checkpoint")
def stopped_while_saving(trial):
    run = trial.train(parallel("ZeRO", "shm"), hook(do="signal_while_saving", value=int(signal.SIGSTOP), rank=0, time_out=MS), "checkpoint.every=2", code=128 + signal.SIGSTOP)
    late = run.when("BrokenWorldError") - trial.fault_at(run)
    trial.check(TIMEOUT * 0.9 < late < TIMEOUT + 2, f"found after {late:.1f} s", run)
    trial.check(f"rank 0 has been stopped for {MS} ms" in run.text(), "survivors name it", run)
    trial.check(trial.named(run, r"rank (\d) \(pid \d+\) is stopped \(SIGSTOP\); \"kill -CONT \d+\" continues it") == [0], "the launcher says it at once", run)
    launcher = trial.named(run, r"root cause: rank (\d) \(pid \d+\) is stopped \(SIGSTOP\)")
    return outcome(f"time-out ({TIMEOUT} s)", launcher, 128 + signal.SIGSTOP, trial.resumes(parallel("ZeRO", "shm")))


@fault(GROUP, "SIGSTOP of a rank that writes a checkpoint, over tcp")
def stopped_while_saving_over_tcp(trial):
    run = trial.train(parallel("ZeRO", "tcp"), hook(do="signal_while_saving", value=int(signal.SIGSTOP), rank=0, time_out=MS), "checkpoint.every=2", code=128 + signal.SIGSTOP)
    late = run.when("BrokenWorldError") - trial.fault_at(run)
    trial.check(TIMEOUT * 0.8 < late < TIMEOUT + 2, f"found after {late:.1f} s", run)
    trial.check(f"rank 0 did not arrive within {MS} ms" in run.text(), "survivors name it", run)
    launcher = trial.named(run, r"root cause: rank (\d) \(pid \d+\) is stopped \(SIGSTOP\)")
    return outcome(f"time-out ({TIMEOUT} s)", launcher, 128 + signal.SIGSTOP, trial.resumes(parallel("ZeRO", "tcp")))


@fault(GROUP, "SIGSTOP of a rank and SIGCONT before the time-out")
def continued(trial):
    run = trial.start_training("train.steps=1000000", hook(do="none", time_out=MS), "checkpoint=null", "train.save=null", "train.log=null")
    run.wait_for_line("step +3/")
    pid = trial.rank_pid(1)
    for _ in range(3):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(TIMEOUT / 3)
        os.kill(pid, signal.SIGCONT)
        since = time.monotonic()
        run.wait_for(lambda: run.process.poll() is not None or run.lines[-1][0] > since + 0.1, 60, "a step after the pause")
    trial.check(run.process.poll() is None, "the run goes on", run)
    run.process.send_signal(signal.SIGTERM)
    code = run.end()
    trial.check(code == 128 + signal.SIGTERM and "BrokenWorldError" not in run.text(), f"exit code {code}", run)
    return outcome("not a fault", "none", code, "the run goes on until it is asked to stop")


@fault(GROUP, "one rank is late by twice the time-out")
def late(trial):
    run = trial.train(hook(do="late", value=2 * MS, at=AT, rank=2, time_out=MS), code=1)
    seconds = run.when("BrokenWorldError") - trial.fault_at(run)
    trial.check(TIMEOUT * 0.9 < seconds < TIMEOUT + 2, f"found after {seconds:.1f} s", run)
    return outcome(f"time-out ({TIMEOUT} s)", trial.named(run, r"rank (\d) did not arrive within"), 1, trial.resumes())


@fault(GROUP, "a rank ends itself: {how}", fast=True,
       cases=[dict(how="exit(3)", do="exit", value=3, code=3), dict(how="abort()", do="signal", value=6, code=134),
              dict(how="a segmentation fault", do="signal", value=11, code=139), dict(how="std::terminate", do="terminate", value=0, code=134),
              dict(how="an exception of the program", do="throw", value=0, code=2)])
def ended(trial, how, do, value, code):
    run = trial.train(hook(do=do, value=value, at=AT, rank=2), code=code)
    trial.check(trial.named(run, SURVIVOR) == [2], "the survivors name the rank", run)
    return outcome(run.when(r"it is the root cause") - trial.fault_at(run), trial.named(run, r"root cause: rank (\d+)"), code, trial.resumes())


@fault(GROUP, "exit(0) of a rank in the middle of the run")
def left_early(trial):
    run = trial.train(hook(do="exit", value=0, at=AT, rank=1), code=1)
    ranks = trial.named(run, r"root cause: rank (\d) \(pid \d+\) exited with code 0 while the other ranks still needed it")
    return outcome(run.when(SURVIVOR) - trial.fault_at(run), ranks, 1, trial.resumes())


@fault(GROUP, "SIGKILL of a rank under --max-restarts: {wrapper}", cases=[dict(wrapper=wrapper) for wrapper in WRAPPERS], fast=True)
def restarted(trial, wrapper):
    once = trial.folder / "once"
    run = trial.train(parallel(wrapper), hook(do="signal", value=9, at=AT, rank=1, once=once), flags=["--max-restarts", 2, "--restart-delay", 0.1])
    trial.find(run, "resuming from run/step-00000004")
    trial.check(trial.weights() == trial.reference(parallel(wrapper)), "the restarted run has other bits", run)
    return outcome(run.when("was killed by SIGKILL") - trial.fault_at(run), trial.named(run, r"rank (\d+) \(pid \d+\) was killed by SIGKILL"), 0,
                   f"{trial.left()}; the same bits as undisturbed")


@fault(GROUP, "SIGKILL of a rank after each restart, more often than --max-restarts 2")
def restarts_end(trial):
    run = trial.train(hook(do="signal", value=9, at=AT, rank=0), flags=["--max-restarts", 2, "--restart-delay", 0.2], code=137)
    times = [at for at, line in run.lines if re.match("fault at", line)]
    trial.check(len(times) == 3 and times[1] - times[0] > 0.2 and times[2] - times[1] > 0.4, f"attempts at {times}", run)
    delays = re.findall(r"restart \d of 2, because .*; waiting ([\d.]+) s", run.text())
    trial.check(delays == ["0.2", "0.4"], f"the delays are {delays}", run)
    return outcome(run.when("was killed by SIGKILL") - trial.fault_at(run), trial.named(run, r"root cause: rank (\d+)"), 137, trial.resumes())


@fault(GROUP, "{name} to the launcher: the run saves and ends", fast=True,
       cases=[dict(name=name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")])
def asked_to_stop(trial, name):
    number = getattr(signal, name)
    # A program under nohup keeps ignoring SIGHUP.
    run = trial.train(hook(do="signal_launcher", value=int(number), at=AT, rank=1), code=128 + number,
                      preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    return outcome(run.when("resumes from run/") - trial.fault_at(run), "none", 128 + number, trial.resumes())


@fault(GROUP, "SIGKILL of the launcher and all ranks at {count} random times, each time resumed", cases=[dict(count=6)], bound=300)
def killed_and_resumed(trial, count):
    chosen = random.Random(1)
    words = ["train.steps=1500", "checkpoint.every=10"]
    for _ in range(count):
        run = trial.start_training(*words)
        run.wait_for_line("checkpoint written to")
        time.sleep(chosen.uniform(0, 0.15))
        trial.check(run.process.poll() is None, "the run has ended before", run)
        run.process.kill()
        run.end()
        trial.nothing_runs()
    left = trial.left()
    trial.check(left.endswith(", sound"), left)
    trial.left_before = "the last checkpoint, sound"
    return outcome("none", "none", 137, trial.resumed(*words))
