#include <cstdlib>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/supervise/open_files.h"
#include "tessera/error.h"
#include "tessera/launch.h"

namespace tessera::launch {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

LaunchOptions good() {
  LaunchOptions options;
  options.program = {"./program"};
  return options;
}

TEST(LaunchOptionsTest, NumbersAreWholeAndInRange) {
  EXPECT_EQ(parse_integer("--nnodes", "12", 1, 100), 12);
  for (const char* bad : {"", "x", "1x", "0", "101", "1.5", "99999999999", " 1"}) {
    EXPECT_THAT([&] { parse_integer("--nnodes", bad, 1, 100); },
                ThrowsMessage<UsageError>(
                    AllOf(HasSubstr("--nnodes"), HasSubstr(bad), HasSubstr("from 1 to 100"))));
  }
}

TEST(LaunchOptionsTest, RanksPerHost) {
  EXPECT_EQ(parse_nproc("-n", "7"), 7);
  EXPECT_GE(parse_nproc("-n", "auto"), 1);
  EXPECT_EQ(parse_nproc("-n", "auto"), parse_nproc("-n", "cpu"));
  EXPECT_THROW(parse_nproc("-n", "gpu"), UsageError);
  EXPECT_THROW(parse_nproc("-n", "-1"), UsageError);
}

TEST(LaunchOptionsTest, StreamChoices) {
  EXPECT_EQ(parse_streams("--tee", "2").of(5), kStderr);
  const StreamChoice some = parse_streams("--tee", "0:3,2:1");
  EXPECT_EQ(some.of(0), kBothStreams);
  EXPECT_EQ(some.of(1), kNoStream);
  EXPECT_EQ(some.of(2), kStdout);
  for (const char* bad : {"", "4", "0:4", "0:", ":1", "0:1,", "a", "0:1,2", "0:3,0:1"})
    EXPECT_THROW(parse_streams("--tee", bad), UsageError) << bad;
}

TEST(LaunchOptionsTest, ALocalRankThatIsGivenTwiceIsAnError) {
  EXPECT_THAT([] { parse_streams("--tee", "0:3,1:1,0:1"); },
              ThrowsMessage<UsageError>(
                  "--tee = '0:3,1:1,0:1': expected every local rank once, not 0 again"));
}

TEST(LaunchOptionsTest, Seconds) {
  EXPECT_EQ(parse_seconds("--grace", "1.5").count(), 1500);
  EXPECT_THROW(parse_seconds("--grace", "-1"), UsageError);
  EXPECT_THROW(parse_seconds("--grace", "nan"), UsageError);
}

TEST(LaunchOptionsTest, SeveralHostsNeedNodeRankAddressAndPort) {
  LaunchOptions options = good();
  EXPECT_NO_THROW(validate(options));
  options.nnodes = 2;
  EXPECT_THAT([&] { validate(options); }, ThrowsMessage<UsageError>(HasSubstr("--node-rank")));
  options.node_rank = 2;
  EXPECT_THAT([&] { validate(options); }, ThrowsMessage<UsageError>(HasSubstr("from 0 to 1")));
  options.node_rank = 1;
  EXPECT_THAT([&] { validate(options); }, ThrowsMessage<UsageError>(HasSubstr("--master-addr")));
  options.master_addr = "host0";
  EXPECT_THAT([&] { validate(options); }, ThrowsMessage<UsageError>(HasSubstr("--master-port")));
  options.master_port = 29500;
  EXPECT_NO_THROW(validate(options));
}

TEST(LaunchOptionsTest, NumbersOfHosts) {
  LaunchOptions options = good();
  parse_nnodes("--nnodes", "3", options);
  EXPECT_EQ(options.nnodes, 3);
  EXPECT_FALSE(options.min_nnodes);
  parse_nnodes("--nnodes", "2:4", options);
  EXPECT_EQ(options.min_nnodes, 2);
  EXPECT_EQ(options.nnodes, 4);
  for (const char* bad : {"", "x", "0", "0:2", "2:", ":2", "2:x", "1:2:3", "-1:2", "4:2", "2-4"}) {
    EXPECT_THAT([&] { parse_nnodes("--nnodes", bad, options); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("--nnodes = '"), HasSubstr(bad))))
        << bad;
  }
  EXPECT_THAT(
      [&] { parse_nnodes("--nnodes", "4:2", options); },
      ThrowsMessage<UsageError>("--nnodes = '4:2': expected MIN:MAX with MIN of at most MAX"));
}

TEST(LaunchOptionsTest, HostsMeetOnlyWhereTheyCanStartAgain) {
  LaunchOptions options = good();
  options.node_rank = 0;
  options.master_addr = "host0";
  options.master_port = 65535;
  options.rejoin_timeout = std::chrono::seconds(30);
  const auto refused = [&](const char* flag, const char* expected) {
    EXPECT_THAT([&] { validate(options); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr(flag), HasSubstr(expected))));
  };
  options.max_restarts = 1;
  refused("--rejoin-timeout = '30'", "several hosts");
  options.nnodes = 2;
  options.max_restarts = 0;
  EXPECT_FALSE(hosts_meet(options));
  refused("--rejoin-timeout = '30'", "--max-restarts above 0 or --nnodes MIN:MAX");
  options.max_restarts = 1;
  EXPECT_TRUE(hosts_meet(options));
  refused("--master-port = '65535'", "at most 65534");
  options.master_port = 29500;
  EXPECT_NO_THROW(validate(options));
  options.max_restarts = 0;
  options.min_nnodes = 1;
  EXPECT_TRUE(hosts_meet(options));
  EXPECT_NO_THROW(validate(options));
  options.min_nnodes = 3;
  refused("--nnodes MIN = '3'", "from 1 to 2");
  options.min_nnodes = 1;
  options.rejoin_timeout = std::chrono::milliseconds(500);
  refused("--rejoin-timeout = '0.5'", "at least 3 seconds");
}

TEST(LaunchOptionsTest, ImpossibleValuesAreRefused) {
  LaunchOptions options = good();
  options.program.clear();
  EXPECT_THROW(validate(options), UsageError);
  options = good();
  options.redirects = parse_streams("--redirects", "3");
  EXPECT_THAT([&] { validate(options); }, ThrowsMessage<UsageError>(HasSubstr("--log-dir")));
  options = good();
  options.tee = parse_streams("--tee", "3:1");
  EXPECT_THAT([&] { validate(options); }, ThrowsMessage<UsageError>(HasSubstr("local ranks")));
}

TEST(LaunchOptionsTest, NprocUnderALauncherIsAnError) {
  setenv("WORLD_SIZE", "4", 1);
  EXPECT_THAT([] { check_no_launcher(2); },
              ThrowsMessage<UsageError>(
                  HasSubstr("-n = 2: expected no -n under a launcher (WORLD_SIZE is set to '4')")));
  unsetenv("WORLD_SIZE");
  EXPECT_NO_THROW(check_no_launcher(2));
}

TEST(LaunchOptionsTest, RanksOfNodesMustFitTheHosts) {
  LaunchOptions options = good();
  options.nnodes = 2;
  options.node_rank = 1;
  options.master_addr = "host0";
  options.master_port = 29500;
  options.nproc_per_node = 3;
  EXPECT_EQ(world_size(options), 6);
  options.ranks_of_nodes = {1, 3};
  EXPECT_NO_THROW(validate(options));
  EXPECT_EQ(world_size(options), 4);
  for (const auto& bad : std::vector<std::vector<int>>{
           {3}, {3, 1}, {0, 3}, {1, 3, 1}, {std::numeric_limits<int>::max(), 3}}) {
    options.ranks_of_nodes = bad;
    EXPECT_THAT([&] { validate(options); },
                ThrowsMessage<UsageError>(HasSubstr("a positive number for each of 2 hosts, 3 for "
                                                    "this one")));
  }
}

TEST(LaunchOptionsTest, OpenFilesAreCounted) {
  LaunchOptions options = good();
  EXPECT_EQ(needed_open_files(options, false),
            2 + 2 + 1);  // guard and lock; pidfd and execve's pipe; that pipe's other end
  options.nproc_per_node = 3;
  EXPECT_EQ(needed_open_files(options, true),
            2 + 3 * 3 + 1 + 1 + 1);  // and one output pipe for each rank, its other end, /dev/null
  EXPECT_EQ(needed_open_files(options, false), 2 + 3 * 4 + 1 + 2 + 1);
  options.log_dir = "logs";
  EXPECT_EQ(needed_open_files(options, true), 2 + 3 * 6 + 1 + 2 + 1);
  options.redirects = parse_streams("--redirects", "0:3,1:2");
  EXPECT_EQ(needed_open_files(options, true), 2 + (6 + 5 + 3) + 1 + 1 + 1);
  options.nproc_per_node = 2'000'000'000;
  EXPECT_EQ(needed_open_files(options, false), 2 + 4 * int64_t{2'000'000'000} + 3 + 1 + 2 + 1);
}

}  // namespace
}  // namespace tessera::launch
