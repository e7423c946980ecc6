#include <cstring>
#include <memory>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launch/launched.h"

namespace tessera::launch_test {
namespace {

using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;

// Shell commands that wait until all ranks have started.
const std::string kWaitForAll =
    "echo x >$TESSERA_RENDEZVOUS/$RANK; until [ $(ls $TESSERA_RENDEZVOUS | wc -l) = $WORLD_SIZE ]; "
    "do :; done; ";

std::vector<std::unique_ptr<Watched>> watch(const std::vector<pid_t>& pids) {
  std::vector<std::unique_ptr<Watched>> result;
  for (pid_t pid : pids) result.push_back(std::make_unique<Watched>(pid));
  return result;
}

TEST(Failure, AnExitCodeIsNamedWithTheLastLines) {
  Launched run(run_shell(3, kWaitForAll + "[ $RANK = 1 ] && { for i in $(seq 30); do echo line$i. "
                                          ">&2; done; exit 3; }; exec sleep 60"));
  EXPECT_EQ(run.finish(), 3);
  EXPECT_THAT(run.err(), HasSubstr("exited with code 3 on "));
  EXPECT_THAT(run.err(), HasSubstr("it is the root cause; ending the other 2 ranks"));
  const std::string report = run.err().substr(run.err().find("root cause: rank 1"));
  EXPECT_THAT(report, HasSubstr("  | line30.\n"));
  EXPECT_THAT(report, HasSubstr("  | line11.\n"));
  EXPECT_THAT(report, Not(HasSubstr("line10.")));
  EXPECT_TRUE(run.tmp().empty());
}

TEST(Failure, ACrashIsNamedByItsSignal) {
  Launched run(
      run_shell(2, kWaitForAll + "ulimit -c 0; [ $RANK = 1 ] && kill -SEGV $$; exec sleep 60"));
  EXPECT_EQ(run.finish(), 139);
  EXPECT_THAT(run.err(), HasSubstr("was killed by SIGSEGV"));
}

TEST(Failure, AKilledRankIsReportedAtOnceAndSurvivorsThatIgnoreSigtermEndToo) {
  // The survivors ignore SIGTERM, and so do their children.
  Launched run(
      run_shell(3, "trap '' TERM INT; echo pid=$$; sleep 60 & echo pid=$!; wait; sleep 60"));
  run.wait_for("pid=", 6);
  const auto all = watch(run.pids());
  const pid_t victim = run.pids()[0];
  const double killed = run.seconds();
  kill(victim, SIGKILL);
  run.wait_for("(pid " + std::to_string(victim) + ") was killed by SIGKILL");
  EXPECT_LT(run.seconds() - killed, 2);
  EXPECT_EQ(run.finish(), 137);
  // The launcher does not reap the ranks' children, so the kernel may end them a moment later.
  for (const auto& process : all) EXPECT_TRUE(process->ended(1)) << process->pid();
  EXPECT_LT(run.seconds() - killed, 5);
}

TEST(Failure, SurvivorsThatEndBecauseOfAFailureAreNotTheCause) {
  // Rank 0 exits with code 1 as soon as it sees that rank 1 has ended.
  Launched run(run_shell(
      2,
      "echo $$ >$TESSERA_RENDEZVOUS/$RANK.tmp; mv $TESSERA_RENDEZVOUS/$RANK.tmp "
      "$TESSERA_RENDEZVOUS/$RANK; " +
          std::string("echo pid=$$; [ $RANK = 1 ] && exec sleep 60; ") +
          "until [ -e $TESSERA_RENDEZVOUS/1 ]; do :; done; read peer <$TESSERA_RENDEZVOUS/1; "
          "until grep -qs 'State:.Z' /proc/$peer/status; do :; done; exit 1"));
  run.wait_for("pid=", 2);
  const size_t victim = run.out().find("[rank 1] pid=");
  kill(std::atoi(run.out().c_str() + victim + 13), SIGKILL);
  EXPECT_EQ(run.finish(), 137);
  EXPECT_THAT(run.err(), HasSubstr("root cause: rank 1 "));
  EXPECT_THAT(run.err(), HasSubstr("the others: rank 0"));
  EXPECT_EQ(occurrences(run.err(), "it is the root cause"), 1);
}

TEST(Failure, AConsequenceThatEndsFirstIsNotTheCause) {
  const std::pair<std::string, int> ends[] = {{"exit 4", 4}, {"kill -KILL $$", 137}};
  for (const auto& [end, code] : ends) {
    Launched run(run_shell(3, kWaitForAll +
                                  "[ $RANK = 0 ] || { echo 'train: BrokenWorldError: rank 0 has "
                                  "left' >&2; exit 1; }; sleep 0.3; " +
                                  end));
    EXPECT_EQ(run.finish(), code);
    EXPECT_EQ(occurrences(run.err(), "because of another rank, according to its last lines"), 2);
    EXPECT_THAT(run.err(), HasSubstr("root cause: rank 0 "));
    EXPECT_EQ(occurrences(run.err(), "it is the root cause"), 1);
  }
}

TEST(Failure, AConsequenceWithoutItsCauseIsTheFirstFailure) {
  Launched run(run_shell(
      2, kWaitForAll + "[ $RANK = 0 ] && exec sleep 60; echo BrokenWorldError >&2; exit 5"));
  run.wait_for("it is the first failure; ending the other 1 rank");
  EXPECT_EQ(run.finish(), 5);
  EXPECT_THAT(run.err(), HasSubstr("first failure: rank 1 "));
  EXPECT_THAT(run.err(), Not(HasSubstr("root cause")));
}

TEST(Failure, AKilledRankIsNotAConsequenceEvenIfItWroteBrokenWorldError) {
  Launched run(run_shell(
      2, kWaitForAll + "[ $RANK = 0 ] && exec sleep 60; echo BrokenWorldError >&2; kill -KILL $$"));
  EXPECT_EQ(run.finish(), 137);
  EXPECT_THAT(run.err(), HasSubstr("it is the root cause"));
}

// A rank's report to the launcher, as the library writes it; see RankReport.
std::string report(int kind, int signal, const std::string& ranks, const std::string& text) {
  return "printf '" + std::to_string(kind) + " " + std::to_string(signal) + " " + ranks + "\\n" +
         text + "' >$TESSERA_REPORT; ";
}
const int kAgreed = 0, kBroken = 1, kStop = 2;

TEST(Failure, AStoppedRankIsTheRootCause) {
  const std::string stops = "[ $RANK = 1 ] && { echo pid=$$; kill -STOP $$; }; ";
  // Rank 0 gives up when rank 1 is stopped, with and without a report that names it.
  const std::string waits =
      "until grep -qs 'State:.T' /proc/$(cat $TESSERA_RENDEZVOUS/pid)/status; "
      "do sleep 0.02; done; ";
  for (const auto& ends : {report(kBroken, 0, "1", "late") + "exit 1",
                           std::string("echo BrokenWorldError >&2; exit 1")}) {
    Launched run(run_shell(2,
                           "[ $RANK = 1 ] && { echo $$ >$TESSERA_RENDEZVOUS/p; mv "
                           "$TESSERA_RENDEZVOUS/p $TESSERA_RENDEZVOUS/pid; }; " +
                               stops + "until [ -e $TESSERA_RENDEZVOUS/pid ]; do :; done; " +
                               waits + ends));
    EXPECT_EQ(run.finish(), 128 + SIGSTOP);
    ASSERT_EQ(run.pids().size(), 1u);
    const std::string name = "rank 1 (pid " + std::to_string(run.pids()[0]) + ")";
    EXPECT_THAT(run.err(), HasSubstr(name + " is stopped (SIGSTOP) on "));
    EXPECT_THAT(run.err(), HasSubstr("root cause: " + name + " is stopped (SIGSTOP)"));
    EXPECT_THAT(run.err(), Not(HasSubstr("first failure")));
    EXPECT_LT(run.seconds(), 6);
  }
}

TEST(Failure, ARankThatExitedWithZeroIsTheCauseOfItsSurvivors) {
  Launched run(run_shell(2, kWaitForAll + "echo pid=$$; [ $RANK = 1 ] && exit 0; sleep 0.3; " +
                                report(kBroken, 0, "1", "rank 1 has left") + "exit 3"));
  EXPECT_EQ(run.finish(), 3);
  EXPECT_THAT(run.err(), testing::ContainsRegex("root cause: rank 1 \\(pid [0-9]+\\) exited with "
                                                "code 0 while the other ranks still needed it"));
  EXPECT_THAT(run.err(), Not(HasSubstr("first failure")));
}

TEST(Failure, OfAnErrorOnAllRanksTheOneWhereItBeganIsTheCause) {
  Launched run(run_shell(3, kWaitForAll + report(kAgreed, 0, "2", "rank 2: no such file") +
                                "[ $RANK = 2 ] && { sleep 0.4; exit 5; }; exit 4"));
  EXPECT_EQ(run.finish(), 5);
  EXPECT_EQ(occurrences(run.err(), "because of rank 2, according to its error"), 2) << run.err();
  EXPECT_THAT(run.err(), testing::ContainsRegex("root cause: rank 2 \\(pid [0-9]+\\) exited with "
                                                "code 5; its error:\n  \\| rank 2: no such file"));
  EXPECT_THAT(run.err(), HasSubstr("the others: rank 0"));
}

TEST(Failure, AFailureOnAnotherHostIsNamed) {
  auto arguments =
      run_shell(2, report(kAgreed, 0, "0", "rank 0: no such file") + "exit 4",
                {"--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "--master-port=29999"});
  Launched run(arguments);
  EXPECT_EQ(run.finish(), 4);
  EXPECT_THAT(run.err(), HasSubstr("the failure began on rank 0, which is on another host"));
  EXPECT_THAT(run.err(), Not(HasSubstr("root cause")));
  EXPECT_TRUE(run.tmp().empty());
}

TEST(Failure, AStopThatARankReportsIsNoFailureAndNoReasonToRestart) {
  // Rank 1 takes longer than ranks get after a failure.
  Launched run(run_shell(2,
                         kWaitForAll + "[ $RANK = 1 ] && sleep 2.5; " + report(kStop, 15, "", "") +
                             "echo saved=$RANK; exit 143",
                         {"--max-restarts=2"}));
  EXPECT_EQ(run.finish(), 143);
  EXPECT_THAT(run.out(), HasSubstr("saved=1"));
  EXPECT_THAT(run.err(), HasSubstr("because SIGTERM stopped the program; waiting up to 30 s"));
  EXPECT_THAT(run.err(), HasSubstr("SIGTERM on another host stopped the program"));
  EXPECT_THAT(run.err(), Not(HasSubstr("root cause")));
  EXPECT_EQ(occurrences(run.err(), "restart"), 0);
}

TEST(Failure, AnErrorOfAnAllocationIsToldWithItsLimit) {
  Launched run(run_shell(2, kWaitForAll + "[ $RANK = 0 ] && exec sleep 60; ulimit -v 409600; "
                                          "echo 'what():  std::bad_alloc' >&2; exit 1"));
  EXPECT_EQ(run.finish(), 1);
  EXPECT_THAT(run.err(),
              testing::ContainsRegex("root cause: rank 1 \\(pid [0-9]+\\) exited with code 1, out "
                                     "of memory \\(RLIMIT_AS 400 MiB; its peak [0-9]+ MiB\\)"));
}

/// A control group with a limit on memory that this process is in. Empty if none can be made.
class LimitedGroup {
 public:
  LimitedGroup() {
    for (const char* root : {"/sys/fs/cgroup/memory", "/sys/fs/cgroup"}) {
      const std::string limit =
          root == std::string("/sys/fs/cgroup") ? "/memory.max" : "/memory.limit_in_bytes";
      path_ = std::string(root) + "/tessera-test-" + std::to_string(getpid());
      root_ = root;
      if (mkdir(path_.c_str(), 0700) != 0) continue;
      if (put(path_ + limit, "67108864") && put(path_ + "/cgroup.procs", "0")) return;
      rmdir(path_.c_str());
    }
    path_.clear();
  }
  ~LimitedGroup() {
    if (path_.empty()) return;
    put(root_ + "/cgroup.procs", "0");
    // The kernel may still count processes that have just ended.
    for (int i = 0; i < 500 && rmdir(path_.c_str()) != 0; ++i) usleep(10000);
  }
  bool empty() const { return path_.empty(); }

 private:
  static bool put(const std::string& path, const char* text) {
    const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    const bool written = fd >= 0 && write(fd, text, strlen(text)) > 0;
    if (fd >= 0) close(fd);
    return written;
  }
  std::string root_, path_;
};

TEST(Failure, AKillByTheKernelForMemoryIsTold) {
  const LimitedGroup group;
  if (group.empty()) GTEST_SKIP() << "no control group with a limit on memory can be made here";
  Launched run(run_shell(2, kWaitForAll + "[ $RANK = 0 ] && exec sleep 60; exec python3 -c "
                                          "'b\"x\" * (1 << 30)'"));
  EXPECT_EQ(run.finish(), 137);
  EXPECT_THAT(run.err(), testing::ContainsRegex("root cause: rank 1 \\(pid [0-9]+\\) was killed by "
                                                "SIGKILL, by the kernel for memory \\(cgroup limit "
                                                "64 MiB; its peak [4-9][0-9] MiB\\)"))
      << run.err();
}

TEST(Failure, AStoppedRankEndsToo) {
  Launched run(run_shell(2, "echo pid=$$; [ $RANK = 0 ] && kill -STOP $$; exec sleep 60"));
  run.wait_for("pid=", 2);
  const auto all = watch(run.pids());
  const size_t victim = run.out().find("[rank 1] pid=");
  kill(std::atoi(run.out().c_str() + victim + 13), SIGKILL);
  EXPECT_EQ(run.finish(), 137);
  for (const auto& process : all) EXPECT_TRUE(process->ended(0)) << process->pid();
}

TEST(Failure, AKilledLauncherLeavesNoProcessesAndNoFiles) {
  // The ranks have background children, which PR_SET_PDEATHSIG does not reach.
  Launched run(run_shell(2, "trap '' TERM INT HUP; sleep 60 & echo pid=$$ pid=$!; wait; sleep 60"));
  run.wait_for("pid=", 4);
  const auto all = watch(run.pids());
  ASSERT_EQ(all.size(), 4u);
  EXPECT_FALSE(run.tmp().empty());
  run.send(SIGKILL);
  EXPECT_EQ(run.finish(), -SIGKILL);
  for (const auto& process : all) EXPECT_TRUE(process->ended()) << process->pid();
  for (int i = 0; i < 500 && !run.tmp().empty(); ++i) usleep(10000);
  EXPECT_TRUE(run.tmp().empty());
}

TEST(Failure, BackgroundProcessesOfARankEndWithTheRun) {
  Launched run(run_shell(2, "sleep 60 & echo pid=$!"));
  run.wait_for("pid=", 2);
  const auto all = watch(run.pids());
  EXPECT_EQ(run.finish(), 0);
  EXPECT_LT(run.seconds(), 30);
  for (const auto& process : all) EXPECT_TRUE(process->ended()) << process->pid();
}

TEST(Failure, RestartsStartAllRanksAgain) {
  Launched run(run_shell(2,
                         "echo attempt=$TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS "
                         "$TESSERA_RENDEZVOUS; " +
                             kWaitForAll + "[ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 4",
                         {"--max-restarts=3"}));
  EXPECT_EQ(run.finish(), 0);
  for (const char* attempt : {"0", "1", "2"})
    EXPECT_EQ(occurrences(run.out(), std::string("attempt=") + attempt + " of 3"), 2);
  EXPECT_EQ(occurrences(run.out(), "attempt=3"), 0);
  EXPECT_THAT(run.err(), HasSubstr("restart 1 of 3, because rank"));
  EXPECT_TRUE(run.tmp().empty());
}

TEST(Failure, RestartsWaitLongerEachTimeAndAreLimitedPerHour) {
  Launched run(
      run_shell(1, "exit 7", {"--max-restarts=9", "--restart-delay=0.2", "--restarts-per-hour=3"}));
  EXPECT_EQ(run.finish(), 7);
  for (const char* wait : {"waiting 0.2 s", "waiting 0.4 s", "waiting 0.8 s"})
    EXPECT_EQ(occurrences(run.err(), wait), 1) << run.err();
  EXPECT_GT(run.seconds(), 1.4);
  EXPECT_THAT(run.err(), HasSubstr("no restart: 3 in the last hour (--restarts-per-hour)"));
}

TEST(Failure, AStoppedRankIsReportedWhileTheOthersRun) {
  Launched run(run_shell(2,
                         "[ $RANK = 0 ] || sh -c 'kill -STOP $PPID; sleep 0.3; kill -CONT "
                         "$PPID; sleep 0.3; kill -STOP $PPID; sleep 0.3; kill -CONT $PPID'"));
  EXPECT_EQ(run.finish(), 0);
  EXPECT_EQ(occurrences(run.err(), "rank 1 (pid "), 2) << run.err();
  EXPECT_EQ(occurrences(run.err(), ") is stopped (SIGSTOP); \"kill -CONT "), 2) << run.err();
}

TEST(Failure, ARankThatStaysStoppedEndsTheRun) {
  // Rank 0 runs or has ended.
  for (const char* rest : {"exec sleep 60", "exit 0"}) {
    Launched run(run_shell(2, std::string("[ $RANK = 0 ] || kill -STOP $$; ") + rest,
                           {"--stopped-timeout=0.5"}));
    EXPECT_EQ(run.finish(), 128 + SIGSTOP);
    EXPECT_LT(run.seconds(), 10);
    EXPECT_THAT(run.err(), HasSubstr(") is stopped (SIGSTOP) on "));
    EXPECT_THAT(run.err(), HasSubstr("root cause: rank 1 (pid "));
  }
  Launched all(
      run_shell(2, "[ $RANK = 0 ] || sleep 0.1; kill -STOP $$", {"--stopped-timeout=0.5"}));
  usleep(1'500'000);
  all.send(SIGTERM);
  all.finish();
  EXPECT_EQ(occurrences(all.err(), "root cause"), 0) << "all were stopped";
}

TEST(Failure, AFailureAfterTheLastRestartEndsTheRun) {
  Launched run(run_shell(2, "exit 7", {"--max_restarts", "1"}));
  EXPECT_EQ(run.finish(), 7);
  EXPECT_EQ(occurrences(run.err(), "it is the root cause"), 2);
}

}  // namespace
}  // namespace tessera::launch_test
