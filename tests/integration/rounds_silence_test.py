#!/usr/bin/env python3
"""Hosts that do not answer, of a training that starts again by itself: cut cables, a host without power, stopped processes, a slow
host. Exits with 77 if namespaces cannot be made.

    rounds_silence_test.py BUILD_FOLDER
"""
import json, os, pathlib, re, signal, sys, time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from processes import kill, marked
from rounds import ADDRESSES, CONFIG, PORT, REJOIN, STEPS, TIME_OUT, TwoLaunchers, main, said
from two_hosts import ip

# A step lasts a few milliseconds, so that a fault may fall into a step or into one of the many checkpoints.
LONG = CONFIG.replace(f"steps: {STEPS}", "steps: 400").replace("every: 4", "every: 2")
PATIENT = LONG.replace(f"time_out: {1000 * TIME_OUT}", "time_out: 30000")
AWAY = 5  # seconds
EARLY = "step +20/"  # with most of the steps to come
# Its losses do not depend on the number of ranks, but for rounding.
TEXT = f"""
model: {{type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2, dropout: 0}}
data: {{type: ByteText, path: /usr/share/common-licenses/GPL-3, seq_len: 16}}
optimizer: {{type: SGD, lr: 0.05}}
parallel: {{type: ZeroRedundancyOptimizer}}
hooks: [{{type: Fault, do: none, time_out: {1000 * TIME_OUT}}}]
train: {{steps: 1000000, global_batch: 48, log: log.jsonl}}
checkpoint: {{folder: run, every: 20}}
"""
FAULT = f"{{type: Fault, do: none, time_out: {1000 * TIME_OUT}}}"



def longest_pause(run):
    """Seconds between two steps."""
    times = [at for at, line in run.lines if re.match(r"step +\d", line)]
    return max(later - earlier for earlier, later in zip(times, times[1:]))


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Silence(TwoLaunchers):
    def hold(self, text):
        """The config with which the ranks wait after step 25 until go() is called, so that the run cannot end before the fault."""
        self.assertIn("do: none", text)
        return text.replace("do: none", f"do: none, at: 25, hold: {self.folder}/go")

    def go(self):
        (self.folder / "go").touch()

    def is_silent(self, seconds):
        self.hosts.cut()
        self.go()
        start = time.monotonic()
        time.sleep(seconds)
        self.hosts.mend()
        return start

    def pids_of(self, host):
        return [int(pid) for pid in ip("netns", "pids", self.hosts.names[host]).split()]

    def test_a_cable_away_for_less_than_the_time_outs_costs_time_alone(self):
        self.configure(self.hold(PATIENT))
        runs = self.train_both(nnodes="2", rejoin=20)
        runs[0].wait_for_line(EARLY)
        self.is_silent(AWAY)
        self.ended(runs, [0, 0])
        self.assertGreater(longest_pause(runs[0]), AWAY - 1, "the cable was cut during training")
        for run in runs:
            self.assertNotRegex(said(run), "round 1|restart|BrokenWorldError")
        self.has_the_bits_of_an_undisturbed_run()

    def test_a_cable_away_for_longer_than_the_time_out_of_the_ranks_names_them_and_costs_a_restart(self):
        self.configure(self.hold(LONG))
        runs = self.train_both(nnodes="2", rejoin=20)
        runs[0].wait_for_line(EARLY)
        start = self.is_silent(AWAY)
        for host, run in enumerate(runs):
            self.within(TIME_OUT + 2, run, rf"BrokenWorldError.*rank {1 - host} did not arrive within {1000 * TIME_OUT} ms", start)
        self.ended(runs, [0, 0])
        for run in runs:
            self.assertRegex(said(run), "restart 1 of 3, because (the failure began on )?rank [01]")
            self.assertNotIn("restart 2", said(run))
        self.has_the_bits_of_an_undisturbed_run()

    def test_a_cable_that_is_cut_for_good(self):
        self.configure(LONG)
        runs = self.train_both("train.steps=1000000")
        runs[0].wait_for_line(EARLY)
        self.hosts.cut()
        start = time.monotonic()
        for host, run in enumerate(runs):
            self.within(TIME_OUT + 2, run, f"BrokenWorldError.*rank {1 - host} did not arrive within", start)
        self.within(REJOIN + 2 + 4, runs[1], rf"node 1 \(\S+\) lost node 0 at {ADDRESSES[0]}:{PORT + 1} .*not heard of for {REJOIN} s \(--rejoin-timeout\): .*; node 0 is needed "
                    "until the end: check that host and the network, and start the launchers of all hosts again", start)
        self.assertEqual(runs[1].end(40), 1, runs[1].text())
        runs[0].wait_for_line("round 1: 1 host, node 0", 40)
        runs[0].process.send_signal(signal.SIGTERM)
        self.ended(runs, [143, 1])

    def test_a_host_without_power_is_left_out_and_taken_in_again_and_the_losses_stay(self):
        self.configure(TEXT)
        runs = self.train_both()
        runs[0].wait_for_line("step +25/")
        self.hosts.cut()  # before the kills, so that nothing tells host 0 of them
        start = time.monotonic()
        for pid in self.pids_of(1):
            kill(pid)
        self.within(TIME_OUT + 2, runs[0], "BrokenWorldError.*rank 1 did not arrive within", start)
        self.within(REJOIN + 2 + 4, runs[0], f"round 1: 1 host, node 0; without node 1, which did not come within {REJOIN} s", start)
        self.goes_on(runs[0])
        self.hosts.mend()
        back = self.train(1)
        runs[0].wait_for_line("round 2: 2 hosts, nodes 0, 1")
        self.goes_on(runs[0])
        runs[0].process.send_signal(signal.SIGTERM)
        self.ended([runs[0], back], [143, 143])
        log = records(self.folder / "log.jsonl")
        self.assertEqual([record["step"] for record in log], list(range(len(log))))
        whole = records(self.undisturbed(f"train.steps={len(log)}") / "log.jsonl")
        self.assertEqual([record["loss"] for record in log[:20]], [record["loss"] for record in whole[:20]], "before the fault")
        for a, b in zip(log, whole, strict=True):
            self.assertLess(abs(a["loss"] - b["loss"]), 1e-4 * b["loss"], f"step {b['step']}")

    def names_the_rank_and_starts_again(self, runs, victim, start):
        """Rank `victim` does not run since `start`."""
        survivor = 1 - victim
        self.within(TIME_OUT + 2, runs[survivor], f"BrokenWorldError.*rank {victim} did not arrive within {1000 * TIME_OUT} ms", start)
        self.ended(runs, [0, 0])
        for run in runs:
            self.assertRegex(said(run), rf"restart 1 of 3, because the failure began on rank {victim}, and rank {survivor} \(pid \d+\) exited with code 1 on node {survivor} ")
            self.assertNotIn("restart 2", said(run))
        self.has_the_bits_of_an_undisturbed_run()

    def test_a_stopped_rank_of_either_node_is_named_and_all_start_again(self):
        self.configure(LONG)
        for victim in range(2):
            with self.subTest(victim=victim):
                self.clear()
                runs = self.train_both(nnodes="2")
                runs[0].wait_for_line(EARLY)
                os.kill(self.rank_pid(victim), signal.SIGSTOP)
                self.names_the_rank_and_starts_again(runs, victim, time.monotonic())

    def while_saving(self, what, milliseconds, **options):
        """A training whose rank 0 does something once, while it writes the checkpoint after step 2."""
        fault = f"{{type: Fault, do: {what}_while_saving, value: {milliseconds}, rank: 0, once: {self.folder}/done, time_out: {1000 * TIME_OUT}}}"
        self.configure(LONG.replace(FAULT, fault).replace("steps: 400", f"steps: {STEPS}"))
        runs = self.train_both(nnodes="2", **options)
        runs[0].wait_for_line("fault at [0-9.]+")
        return runs, runs[0].when("fault at")

    def test_rank_0_stopped_while_it_writes_a_checkpoint_is_named(self):
        runs, start = self.while_saving("signal", int(signal.SIGSTOP))
        self.names_the_rank_and_starts_again(runs, 0, start)

    def test_a_rank_stopped_while_it_waits_for_the_checkpoint_of_another_is_named(self):
        runs, _ = self.while_saving("sleep", 2000)
        os.kill(self.rank_pid(1), signal.SIGSTOP)
        self.names_the_rank_and_starts_again(runs, 1, time.monotonic())

    def test_a_cable_cut_while_a_checkpoint_is_written(self):
        runs, _ = self.while_saving("sleep", 2000, rejoin=20)
        start = self.is_silent(AWAY)
        for host, run in enumerate(runs):
            self.within(TIME_OUT + 2, run, rf"BrokenWorldError.*rank {1 - host} did not arrive within {1000 * TIME_OUT} ms", start)
        self.ended(runs, [0, 0])
        self.has_the_bits_of_an_undisturbed_run()

    def test_a_slow_disk_costs_time_alone(self):
        runs, _ = self.while_saving("sleep", 1000 * (TIME_OUT + 3))
        self.ended(runs, [0, 0])
        self.assertGreater(longest_pause(runs[0]), TIME_OUT + 2)
        for run in runs:
            self.assertNotRegex(said(run), "round 1|restart|BrokenWorldError")
        self.has_the_bits_of_an_undisturbed_run()

    def test_a_stopped_launcher_is_left_out_and_taken_in_again(self):
        runs = self.train_both("train.steps=1000000")
        runs[0].wait_for_line("step +8/")
        (launcher,) = [pid for pid in self.pids_of(1) if b"tessera\0run" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() and pid in marked(self.mark)][:1]
        os.kill(launcher, signal.SIGSTOP)
        start = time.monotonic()
        self.within(REJOIN + 2 + 4, runs[0], f"round 1: 1 host, node 0; without node 1, which did not come within {REJOIN} s", start)
        self.goes_on(runs[0])
        os.kill(launcher, signal.SIGCONT)
        runs[0].wait_for_line("round 2: 2 hosts, nodes 0, 1")
        self.goes_on(runs[0])
        runs[0].process.send_signal(signal.SIGTERM)
        self.ended(runs, [143, 143])

    def test_a_slow_host_costs_time_alone(self):
        self.configure(PATIENT)
        runs = self.train_both(nnodes="2", rejoin=20)
        runs[0].wait_for_line("step +20/")
        pids = self.pids_of(1)
        for _ in range(8):  # it has a fifth of its time
            for number, seconds in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.1)):
                for pid in pids:
                    kill(pid, number)
                time.sleep(seconds)
        self.ended(runs, [0, 0])
        self.assertGreater(longest_pause(runs[0]), 0.3, "the host was slow during training")
        for run in runs:
            self.assertNotRegex(said(run), "round 1|restart|BrokenWorldError")
        self.has_the_bits_of_an_undisturbed_run()


if __name__ == "__main__":
    main(jobs=2)
