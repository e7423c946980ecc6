#include "ddp/bucket_cap.h"

#include <mutex>
#include <set>

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "harness/ranks.h"
#include "tessera/distributed_data_parallel.h"

namespace tessera {
namespace {

using testing::run_ranks_on;

constexpr double kGigabit = 125e6;  // bytes per second

TEST(BucketCap, FollowsFromLatencyTimesBandwidth) {
  EXPECT_EQ(bucket_mib_for(10e-6, kGigabit), 1);
  EXPECT_EQ(bucket_mib_for(1e-3, kGigabit), 2);
  EXPECT_EQ(bucket_mib_for(1e-3, 4 * kGigabit), 8);
  EXPECT_EQ(bucket_mib_for(1e-3, 8 * kGigabit), 16);
  EXPECT_EQ(bucket_mib_for(1e-3, 10 * kGigabit), kDefaultBucketMib);
  EXPECT_EQ(bucket_mib_for(1, kGigabit), kDefaultBucketMib);
}

TEST(BucketCap, IsTheSameOnAllRanksOfSeveralHosts) {
  std::mutex mutex;
  std::set<double> chosen;
  run_ranks_on({0, 1, 1}, [&](ProcessGroup group, int rank) {
    const double mib = choose_bucket_mib(group);
    const std::lock_guard lock(mutex);
    chosen.insert(mib);
  });
  ASSERT_EQ(chosen.size(), 1u);
  EXPECT_TRUE(std::set<double>({1, 2, 4, 8, 16, kDefaultBucketMib}).count(*chosen.begin()));
}

TEST(BucketCap, OnOneHostNothingIsSent) {
  run_ranks_on({0, 0}, [&](ProcessGroup group, int rank) {
    EXPECT_EQ(choose_bucket_mib(group), kDefaultBucketMib);
    EXPECT_EQ(group.stats().all_reduce.calls, 0u);
    EXPECT_EQ(group.stats().broadcast.calls, 0u);
  });
}

TEST(BucketCap, AHookAndAGivenSizeAreNotProbed) {
  run_ranks_on({0, 1}, [&](ProcessGroup group, int rank) {
    const auto probes = [&](DistributedDataParallelOptions options) {
      const auto before = group.stats().all_reduce.calls;
      DistributedDataParallel ddp(torch::nn::Linear(3, 3), group, std::move(options));
      return group.stats().all_reduce.calls - before;
    };
    EXPECT_GT(probes({}), 0u);
    EXPECT_EQ(probes({.bucket_cap_mb = 2}), 0u);
    EXPECT_EQ(probes({.comm_hook = fp16_compress_hook()}), 0u);
  });
}

}  // namespace
}  // namespace tessera
