// DistributedDataParallel on several hosts reduces its buckets in two groups in turn.
#include <chrono>
#include <functional>

#include <gtest/gtest.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"

namespace tessera {
namespace {

using testing::clear_gradients;
using testing::expect_usage_errors;
using testing::loss_of;
using testing::rows;
using testing::run_ranks_catching;
using testing::run_ranks_on;
using testing::seeded;
using testing::Uneven;

const DistributedDataParallelOptions kSmallBuckets{.first_bucket_mb = 20.0 / (1 << 20),
                                                   .bucket_cap_mb = 60.0 / (1 << 20)};

TEST(DdpHosts, TheGroupCountsTheTrafficOfAllBuckets) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 1}, {0, 0, 1, 1}, {0, 1, 1}}) {
    run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(2);
      DistributedDataParallel ddp(net, group, kSmallBuckets);
      double bytes = 0;
      for (const auto& p : net->parameters()) bytes += 4.0 * static_cast<double>(p.numel());
      for (int step = 0; step < 3; ++step) {
        clear_gradients(net->parameters());
        if (step == 1) ddp(rows(0));  // buckets are rebuilt before this forward
        group.reset_stats();
        loss_of(ddp(rows(step, rank, group.size()))).backward();
        EXPECT_GT(ddp.buckets(), 2u);
        EXPECT_EQ(group.stats().all_reduce.calls, ddp.buckets());
        const auto sent = static_cast<double>(group.stats().all_reduce.bytes_sent);
        EXPECT_NEAR(sent, 2 * bytes * (group.size() - 1) / group.size(), 8.0 * ddp.buckets());
      }
    });
  }
}

using AfterForward = std::function<void(ProcessGroup& group, int rank, at::Tensor loss)>;

/// `body` is an error with `text` on both of two ranks on two hosts, with exact gradients and with
/// rounded ones, which travel in a group of their own.
void expect_errors_at_once(const AfterForward& body, const char* text) {
  for (const auto format : {WireFormat::float32, WireFormat::int8}) {
    SCOPED_TRACE(to_string(format));
    auto options = kSmallBuckets;
    options.wire.gradients = format;
    const auto begin = std::chrono::steady_clock::now();
    expect_usage_errors(run_ranks_catching(2,
                                           [&](ProcessGroup group, int rank) {
                                             auto net = seeded<Uneven>(2);
                                             DistributedDataParallel ddp(net, group, options);
                                             body(group, rank, loss_of(ddp(rows(0, rank, 2))));
                                           },
                                           {.timeout = std::chrono::seconds(30)}, {0, 1}),
                        text);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  }
}

TEST(DdpHosts, ARankThatSkipsBackwardIsNoticedAtOnce) {
  expect_errors_at_once(
      [](ProcessGroup& group, int rank, at::Tensor loss) {
        auto metric = torch::ones({1});
        if (rank == 0) loss.backward();
        else group.all_reduce(metric);
        group.barrier();
      },
      "bucket 0 of backward 1");
}

TEST(DdpHosts, AFailureInformsARankThatReducesBuckets) {
  expect_errors_at_once(
      [](ProcessGroup& group, int rank, at::Tensor loss) {
        if (rank == 1) group.fail("rank 1 has read a wrong file");
        loss.backward();
      },
      "rank 1 has read a wrong file");
}

}  // namespace
}  // namespace tessera
