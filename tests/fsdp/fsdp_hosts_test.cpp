#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/chain.h"
#include "harness/ranks.h"
#include "tessera/fully_sharded_data_parallel.h"

// hybrid_shard without a shard_group_size shards inside each host and replicates across hosts.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::Each;
using ::testing::HasSubstr;

FullyShardedDataParallelOptions hybrid() {
  auto options = every_leaf();
  options.sharding_strategy = ShardingStrategy::hybrid_shard;
  return options;
}

/// The message of what each rank threw in constructing a model on these hosts.
std::vector<std::string> errors_on(const std::vector<int>& hosts) {
  const auto errors = run_ranks_catching(
      static_cast<int>(hosts.size()),
      [](ProcessGroup group, int) {
        FullyShardedDataParallel fsdp(seeded<Chain>(1), group, hybrid());
      },
      {}, hosts);
  std::vector<std::string> messages;
  for (const auto& error : errors) messages.push_back(message_of(error));
  return messages;
}

TEST(FsdpHosts, HybridShardShardsWithinAHost) {
  run_ranks_on({0, 0, 1, 1}, [](ProcessGroup group, int rank) {
    FullyShardedDataParallel fsdp(seeded<Chain>(1), group, hybrid());
    EXPECT_EQ(fsdp.first_replica(), rank < 2);
    auto explicit_size = hybrid();
    explicit_size.shard_group_size = 2;
    FullyShardedDataParallel same(seeded<Chain>(1), group, explicit_size);
    ASSERT_EQ(fsdp.units().size(), same.units().size());
    for (size_t u = 0; u < fsdp.units().size(); ++u)
      EXPECT_EQ(fsdp.units()[u].sharded_bytes, same.units()[u].sharded_bytes) << u;
  });
}

TEST(FsdpHosts, HybridShardOnOneHostShardsOverAllRanks) {
  run_ranks_on({0, 0, 0}, [](ProcessGroup group, int) {
    FullyShardedDataParallel fsdp(seeded<Chain>(1), group, hybrid());
    EXPECT_TRUE(fsdp.first_replica());
  });
}

TEST(FsdpHosts, HostsOfUnequalSizeAreAnErrorOnEveryRank) {
  EXPECT_THAT(
      errors_on({0, 0, 1}),
      Each(HasSubstr("shard_group_size is 0, but the ranks are not placed on hosts of equal "
                     "size: rank 2 is local rank 0 of 1 on its host, expected local rank 0 "
                     "of 2")));
  EXPECT_THAT(errors_on({0, 0, 1, 2}), Each(HasSubstr("rank 2 is local rank 0 of 1")));
}

TEST(FsdpHosts, RanksOfAHostThatAreNotConsecutiveAreAnErrorOnEveryRank) {
  EXPECT_THAT(
      errors_on({0, 1, 0, 1}),
      Each(HasSubstr("rank 1 is local rank 0 of 2 on its host, expected local rank 1 of 2")));
}

}  // namespace
