#include "launch/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::launch {
namespace {

using testing::Contains;
using testing::Each;
using testing::IsSupersetOf;
using testing::Not;
using testing::StartsWith;

LaunchOptions two_hosts() {
  LaunchOptions options;
  options.nproc_per_node = 4;
  options.nnodes = 2;
  options.node_rank = 1;
  return options;
}

Attempt attempt() {
  Attempt result;
  result.run_id = "abc";
  result.master_addr = "host0";
  result.master_port = 1234;
  return result;
}

TEST(EnvironmentTest, PlaceOfARankAmongSeveralHosts) {
  EXPECT_THAT(
      rank_environment(two_hosts(), attempt(), 2, {"HOME=/h"}),
      IsSupersetOf({"HOME=/h", "RANK=6", "LOCAL_RANK=2", "WORLD_SIZE=8", "LOCAL_WORLD_SIZE=4",
                    "GROUP_RANK=1", "NODE_RANK=1", "GROUP_WORLD_SIZE=2", "MASTER_ADDR=host0",
                    "MASTER_PORT=1234", "TORCHELASTIC_RESTART_COUNT=0",
                    "TORCHELASTIC_MAX_RESTARTS=0", "TORCHELASTIC_RUN_ID=abc"}));
}

TEST(EnvironmentTest, PlaceOfARankAmongHostsOfDifferentSizes) {
  LaunchOptions options = two_hosts();
  options.ranks_of_nodes = {3, 4};
  EXPECT_THAT(rank_environment(options, attempt(), 2, {}),
              IsSupersetOf({"RANK=5", "LOCAL_RANK=2", "WORLD_SIZE=7", "LOCAL_WORLD_SIZE=4",
                            "NODE_RANK=1", "GROUP_WORLD_SIZE=2"}));
  options.node_rank = 0;
  options.nproc_per_node = 3;
  EXPECT_THAT(rank_environment(options, attempt(), 2, {}),
              IsSupersetOf({"RANK=2", "WORLD_SIZE=7", "LOCAL_WORLD_SIZE=3"}));
}

TEST(EnvironmentTest, ASurroundingLaunchersVariablesAreReplacedOrDropped) {
  const auto result =
      rank_environment(two_hosts(), attempt(), 0,
                       {"RANK=9", "TORCHELASTIC_USE_AGENT_STORE=True", "TESSERA_RENDEZVOUS=/old",
                        "TESSERA_REPORT=/old/.report.9"});
  EXPECT_THAT(result, Contains("RANK=4"));
  EXPECT_THAT(result, Not(Contains("RANK=9")));
  EXPECT_THAT(result, Each(Not(StartsWith("TORCHELASTIC_USE_AGENT_STORE"))));
  EXPECT_THAT(result, Each(Not(StartsWith("TESSERA_RENDEZVOUS"))));
  EXPECT_THAT(result, Each(Not(StartsWith("TESSERA_REPORT"))));
}

TEST(EnvironmentTest, RendezvousFolderOfOneHost) {
  LaunchOptions options;
  Attempt here = attempt();
  here.rendezvous = "/run/x";
  EXPECT_THAT(rank_environment(options, here, 0, {}), Contains("TESSERA_RENDEZVOUS=/run/x"));
}

TEST(EnvironmentTest, TheLaunchersSecretDoesNotReplaceTheUsers) {
  Attempt here = attempt();
  EXPECT_THAT(rank_environment({}, here, 0, {}), Each(Not(StartsWith("TESSERA_SECRET"))));
  here.secret = "abc";
  EXPECT_THAT(rank_environment({}, here, 0, {}), Contains("TESSERA_SECRET=abc"));
  for (const char* const own : {"TESSERA_SECRET=own", "TESSERA_SECRET_FILE=/own"}) {
    const auto result = rank_environment({}, here, 0, {own});
    EXPECT_THAT(result, Contains(own));
    EXPECT_THAT(result, Not(Contains("TESSERA_SECRET=abc")));
  }
}

TEST(EnvironmentTest, EveryRankHasAFileForItsReport) {
  Attempt with_reports = attempt();
  with_reports.reports = "/run/x";
  EXPECT_THAT(rank_environment(two_hosts(), with_reports, 1, {}),
              Contains("TESSERA_REPORT=/run/x/.report.5"));
}

TEST(EnvironmentTest, ThreadsAreLimitedForSeveralRanksOnly) {
  LaunchOptions one;
  EXPECT_FALSE(limits_threads(one, {}));
  EXPECT_TRUE(limits_threads(two_hosts(), {"OMP_NUM_THREADS_X=2"}));
  EXPECT_FALSE(limits_threads(two_hosts(), {"OMP_NUM_THREADS=2"}));
  EXPECT_THAT(rank_environment(two_hosts(), attempt(), 0, {}), Contains("OMP_NUM_THREADS=1"));
  EXPECT_THAT(rank_environment(two_hosts(), attempt(), 0, {"OMP_NUM_THREADS=2"}),
              Contains("OMP_NUM_THREADS=2"));
}

TEST(EnvironmentTest, OnlyRankZeroGetsTheVariablesOfTheTerminal) {
  LaunchOptions options;
  options.nproc_per_node = 2;
  Attempt here = attempt();
  here.terminal = true;
  here.columns = 99;
  EXPECT_THAT(rank_environment(options, here, 0, {}),
              IsSupersetOf({"TESSERA_TTY=1", "COLUMNS=99"}));
  EXPECT_THAT(rank_environment(options, here, 1, {}), Each(Not(StartsWith("TESSERA_TTY"))));
}

}  // namespace
}  // namespace tessera::launch
