#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "launch/launched.h"

namespace tessera::launch_test {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(Interrupt, TheFirstSignalIsForwardedAndRanksCanEndGracefully) {
  Launched run(
      run_shell(2, "trap 'echo saved; exit 0' INT; echo ready; while :; do sleep 0.05; done"));
  run.wait_for("ready", 2);
  run.send(SIGINT);
  EXPECT_EQ(run.finish(), 0);
  EXPECT_EQ(occurrences(run.out(), "saved"), 2);
  EXPECT_THAT(run.err(), HasSubstr("SIGINT: forwarded to 2 ranks"));
  EXPECT_THAT(run.err(), Not(HasSubstr("root cause")));
  EXPECT_TRUE(run.tmp().empty());
}

TEST(Interrupt, AProgramWithoutAHandlerEndsByTheSignal) {
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
    Launched run(run_shell(2, "ulimit -c 0; echo ready; exec sleep 60", {"--max-restarts=2"}));
    run.wait_for("ready", 2);
    run.send(number);
    EXPECT_EQ(run.finish(), 128 + number);
    EXPECT_TRUE(run.tmp().empty());
  }
}

TEST(Interrupt, AnAnnouncedEndHasNoDeadlineAndALaterSignalIsTheFirst) {
  Launched run(run_shell(2,
                         "trap 'echo announced' USR1; trap 'echo saved; exit 0' TERM; echo ready; "
                         "while :; do sleep 0.05; done",
                         {"--grace=0.2", "--max-restarts=2"}));
  run.wait_for("ready", 2);
  run.send(SIGUSR1);
  run.wait_for("announced", 2);
  usleep(1'500'000);
  run.send(SIGTERM);
  EXPECT_EQ(run.finish(), 0);
  EXPECT_EQ(occurrences(run.out(), "saved"), 2);
  EXPECT_THAT(run.err(), HasSubstr("SIGUSR1: forwarded to 2 ranks"));
  EXPECT_THAT(run.err(), Not(HasSubstr("killing")));
}

TEST(Interrupt, ASignalDuringTheWaitForARestartEndsTheLauncher) {
  Launched run(run_shell(1, "exit 5", {"--max-restarts=3", "--restart-delay=50"}));
  run.wait_for("; waiting 50 s");
  run.send(SIGTERM);
  EXPECT_EQ(run.finish(), 5);
  EXPECT_LT(run.seconds(), 20);
}

TEST(Interrupt, TheExitCodeOfAnInterruptedProgramIsPassedOn) {
  Launched run(run_shell(2, "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done"));
  run.wait_for("ready", 2);
  run.send(SIGTERM);
  EXPECT_EQ(run.finish(), 9);
}

TEST(Interrupt, SignalsWithinASecondAreOneRequestToStop) {
  Launched run(run_shell(
      2,
      "trap 'sleep 0.3; echo saved; exit 0' TERM HUP; echo ready; while :; do sleep 0.05; done"));
  run.wait_for("ready", 2);
  run.send(SIGTERM);
  run.wait_for("SIGTERM: forwarded to 2 ranks");
  run.send(SIGTERM);
  run.send(SIGHUP);
  EXPECT_EQ(run.finish(), 0);
  EXPECT_EQ(occurrences(run.out(), "saved"), 2);
  EXPECT_THAT(run.err(), Not(HasSubstr("killing")));
}

TEST(Interrupt, ASignalAfterAFailurePreventsARestart) {
  Launched run(run_shell(
      2,
      "[ $RANK = 1 ] && exit 3; trap 'echo terminated; exit 0' TERM; while :; do sleep 0.05; done",
      {"--max-restarts=1"}));
  run.wait_for("it is the root cause");
  run.send(SIGINT);
  EXPECT_EQ(run.finish(), 3);
  EXPECT_THAT(run.err(), HasSubstr("SIGINT: ending the ranks"));
  EXPECT_THAT(run.err(), Not(HasSubstr("restart 1 of 1")));
  EXPECT_EQ(run.out(), "terminated\n");  // the rank had time to handle SIGTERM
}

TEST(Interrupt, ASecondSignalKillsAtOnce) {
  Launched run(run_shell(2, "trap '' INT; echo pid=$$; while :; do sleep 60; done"));
  run.wait_for("pid=", 2);
  const Watched first(run.pids()[0]), second(run.pids()[1]);
  run.send(SIGINT);
  run.wait_for("a second signal after 1 s kills at once");
  usleep(1'100'000);
  run.send(SIGINT);
  EXPECT_EQ(run.finish(), 130);
  EXPECT_TRUE(first.ended(0));
  EXPECT_TRUE(second.ended(0));
  EXPECT_LT(run.seconds(), 15);
  EXPECT_TRUE(run.tmp().empty());
}

TEST(Interrupt, RanksAreKilledWhenTheGraceTimeHasPassed) {
  Launched run(
      run_shell(2, "trap '' TERM; echo ready; while :; do sleep 60; done", {"--grace=0.2"}));
  run.wait_for("ready", 2);
  run.send(SIGTERM);
  EXPECT_EQ(run.finish(), 143);
  EXPECT_THAT(run.err(), HasSubstr("waiting up to 0.2 s"));
}

}  // namespace
}  // namespace tessera::launch_test
