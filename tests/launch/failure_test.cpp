#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
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
  for (const char* attempt : {"0", "1", "2"}) {
    EXPECT_EQ(occurrences(run.out(), std::string("attempt=") + attempt + " of 3"), 2);
  }
  EXPECT_EQ(occurrences(run.out(), "attempt=3"), 0);
  EXPECT_THAT(run.err(), HasSubstr("restart 1 of 3, because rank"));
  EXPECT_TRUE(run.tmp().empty());
}

TEST(Failure, RestartsWaitLongerEachTimeAndAreLimitedPerHour) {
  Launched run(
      run_shell(1, "exit 7", {"--max-restarts=9", "--restart-delay=0.2", "--restarts-per-hour=3"}));
  EXPECT_EQ(run.finish(), 7);
  for (const char* wait : {"waiting 0.2 s", "waiting 0.4 s", "waiting 0.8 s"}) {
    EXPECT_EQ(occurrences(run.err(), wait), 1) << run.err();
  }
  EXPECT_GT(run.seconds(), 1.4);
  EXPECT_THAT(run.err(), HasSubstr("no restart: 3 in the last hour (--restarts-per-hour)"));
}

TEST(Failure, AFailureAfterTheLastRestartEndsTheRun) {
  Launched run(run_shell(2, "exit 7", {"--max_restarts", "1"}));
  EXPECT_EQ(run.finish(), 7);
  EXPECT_EQ(occurrences(run.err(), "it is the root cause"), 2);
}

}  // namespace
}  // namespace tessera::launch_test
