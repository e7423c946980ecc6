#include "launch/supervise/report.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace tessera::launch {
namespace {

Exit coded(int rank, int code, bool consequence = false) {
  Exit exit;
  exit.rank = rank;
  exit.pid = 100 + rank;
  exit.code = code;
  exit.consequence = consequence;
  return exit;
}

Exit killed(int rank, int signal, bool consequence = false) {
  Exit exit = coded(rank, 0, consequence);
  exit.signal = signal;
  return exit;
}

TEST(ReportTest, OfEqualFailuresTheFirstIsTheRootCause) {
  EXPECT_EQ(root_cause({coded(1, 3), coded(0, 1)}), 0u);
}

TEST(ReportTest, ADeathByAnExternalSignalRanksBeforeAnExitCode) {
  EXPECT_EQ(root_cause({coded(0, 1), killed(1, SIGKILL)}), 1u);
}

TEST(ReportTest, AnAbortRanksAsAnExitCode) {
  EXPECT_EQ(root_cause({coded(0, 1), killed(1, SIGABRT)}), 0u);
}

TEST(ReportTest, ConsequencesRankLast) {
  EXPECT_EQ(root_cause({killed(0, SIGABRT, true), coded(1, 3)}), 1u);
  EXPECT_EQ(root_cause({coded(0, 1, true), coded(1, 1, true)}), 0u);
  EXPECT_EQ(root_cause({coded(0, 1, true), coded(1, 1, true), killed(2, SIGKILL)}), 2u);
  EXPECT_TRUE(mentions_broken_world(
      {"terminate called after throwing 'tessera::BrokenWorldError'", "what(): …"}));
  EXPECT_FALSE(mentions_broken_world({"out of memory"}));
}

TEST(ReportTest, Words) {
  EXPECT_EQ(title(coded(0, 3)), "root cause");
  EXPECT_EQ(title(coded(0, 3, true)), "first failure");
  EXPECT_EQ(describe(coded(0, 3)), "rank 0 (pid 100) exited with code 3");
  EXPECT_EQ(describe(killed(2, SIGKILL)), "rank 2 (pid 102) was killed by SIGKILL");
  EXPECT_EQ(killed(2, SIGKILL).shell_code(), 137);
}

}  // namespace
}  // namespace tessera::launch
