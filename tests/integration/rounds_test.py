#!/usr/bin/env python3
"""Restarts across two hosts: lost ranks and launchers, late hosts, flags that differ. Exits with 77 if namespaces cannot be made.

    rounds_test.py BUILD_FOLDER
"""
import os, pathlib, signal, sys, time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from processes import is_running
from rounds import ADDRESSES, CONFIG, PORT, REJOIN, STEPS, TwoLaunchers, main, said


class Rounds(TwoLaunchers):
    def kills_a_rank(self, victim):
        self.configure(CONFIG.replace(f"steps: {STEPS}", "steps: 400").replace("every: 4", "every: 20"))
        runs = self.train_both(nnodes="2")
        runs[0].wait_for_line("step +60/")
        os.kill(self.rank_pid(victim), signal.SIGKILL)
        self.ended(runs, [0, 0])
        for run in runs:
            self.assertRegex(run.text(), rf"restart 1 of 3, because rank {victim} \(pid \d+\) was killed by SIGKILL on node {victim} ")
        self.has_the_bits_of_an_undisturbed_run()

    def test_a_lost_rank_of_node_0_restarts_both_hosts_and_the_bits_are_the_same(self):
        self.kills_a_rank(0)

    def test_a_lost_rank_of_node_1_restarts_both_hosts_and_the_bits_are_the_same(self):
        self.kills_a_rank(1)

    def test_hosts_with_different_numbers_of_ranks_train_and_start_again_as_one_host_with_all_of_them(self):
        self.configure(CONFIG.replace(f"steps: {STEPS}", "steps: 200").replace("every: 4", "every: 20"))
        runs = [self.train(host, nnodes="2", ranks_here=3 - 2 * host) for host in range(2)]
        runs[0].wait_for_line("step +30/")
        os.kill(self.rank_pid(3), signal.SIGKILL)
        self.ended(runs, [0, 0])
        self.assertIn("round 1: 2 hosts, nodes 0, 1; node 0 has node rank 0 and ranks 0 to 2 of 4", said(runs[0]))
        self.assertIn("round 1: 2 hosts, nodes 0, 1; node 1 has node rank 1 and rank 3 of 4", said(runs[1]))
        self.assertRegex(said(runs[0]), r"restart 1 of 3, because rank 3 \(pid \d+\) was killed by SIGKILL on node 1 ")
        self.has_the_bits_of_an_undisturbed_run(ranks_here=4)

    def test_a_lost_launcher_is_left_out_and_taken_in_again(self):
        runs = self.train_both("train.steps=1000000")
        runs[0].wait_for_line("step +8/")
        pid = self.rank_pid(1)
        runs[1].process.kill()
        runs[0].wait_for_line(r"round 1: 1 host, node 0; without node 1, which did not come within 4 s")
        self.assertFalse(is_running(pid), "the rank of the lost launcher")
        self.goes_on(runs[0])
        back = self.train(1, "train.steps=1000000")
        back.wait_for_line(r"round 2: 2 hosts, nodes 0, 1; node 1 has node rank 1")
        self.assertRegex(runs[0].text(), "node 1 came; all hosts start again together")
        self.goes_on(runs[0])
        runs[0].process.send_signal(signal.SIGTERM)
        self.ended([runs[0], back], [143, 143])

    def test_without_node_0_the_others_end_at_once(self):
        runs = self.train_both("train.steps=1000000")
        runs[0].wait_for_line("step +3/")
        start = time.monotonic()
        runs[0].process.kill()
        self.assertEqual(runs[1].end(30), 1, runs[1].text())
        self.assertLess(time.monotonic() - start, REJOIN + 2 + 4)
        self.assertRegex(runs[1].text(), rf"tessera run: node 1 \(\S+\) lost node 0 at {ADDRESSES[0]}:{PORT + 1} \(--master-addr, --master-port \+ 1\): its launcher has "
                         "ended; node 0 is needed until the end: the output of that launcher says why; then start the launchers of all hosts again")
        self.ended(runs, [137, 1])

    def test_a_host_that_is_late_is_waited_for(self):
        first = self.launch(1, "true", rejoin=20)
        first.wait_for(lambda: first.process.poll() is None, 5, "it runs")
        time.sleep(2)
        second = self.launch(0, "true", rejoin=20)
        self.ended([second, first], [0, 0])
        self.assertIn("round 0: 2 hosts, nodes 0, 1", first.text())

    def test_a_host_that_does_not_come_is_an_error_on_the_others(self):
        run = self.launch(0, "true", nnodes="2")
        self.ended([run], [1])
        self.assertRegex(run.text(), rf"node 1 did not come within {REJOIN} s \(--rejoin-timeout\): 1 host here, 2 or more expected \(--nnodes\); start a launcher on each "
                         r"host, or expect fewer hosts \(--nnodes MIN:MAX\)")

    def test_without_node_0_nobody_starts(self):
        run = self.launch(1, "true")
        self.ended([run], [1])
        self.assertRegex(run.text(), rf"node 1 \(\S+\) did not reach node 0 at {ADDRESSES[0]}:{PORT + 1} .*not heard of for 4 s \(--rejoin-timeout\): Connection refused; "
                         "expected a launcher there with --node-rank 0 and this launcher's --nnodes, --max-restarts and --master-port")

    def test_other_flags_are_an_error_that_names_both(self):
        runs = [self.launch(0, "true", nnodes="2"), self.launch(1, "true", nnodes="2", restarts=2)]
        self.ended(runs, [1, 2])
        self.assertRegex(runs[1].text(), "flags of node 1 are .*--max-restarts 2.* expected those of node 0, .*--max-restarts 3")
        self.assertIn("other flags on node 1", runs[0].text())

    def test_a_node_rank_that_another_launcher_has_is_an_error(self):
        runs = [self.launch(host, "sleep", "60") for host in range(2)]
        runs[1].wait_for_line("round 0")
        third = self.launch(1, "true")
        self.assertEqual(third.end(20), 2, third.text())
        self.assertRegex(third.text(), "--node-rank = '1': expected a number of its own, because the launcher on host .* has it")
        self.assertIsNone(runs[0].process.poll())
        for run in runs:
            run.process.send_signal(signal.SIGTERM)
        self.ended(runs, [143, 143])


if __name__ == "__main__":
    main(jobs=2)
