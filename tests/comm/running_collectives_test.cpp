#include "tessera/detail/running_collectives.h"

#include <chrono>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "harness/ranks.h"

// What a process reports of the collectives that its threads are in. The ranks are threads here, so
// the list has those of all ranks.

namespace tessera {
namespace {

using detail::RunningCollective;

/// The collectives, as soon as there are `count`.
std::vector<RunningCollective> wait_for_collectives(int count) {
  std::vector<RunningCollective> all(16);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  int found = 0;
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    found = detail::running_collectives(all.data(), 16);
  } while (found != count && std::chrono::steady_clock::now() < end);
  all.resize(static_cast<size_t>(found));
  return all;
}

void expect_one_late_rank(Backend backend, int late_known) {
  ProcessGroupOptions options;
  options.backend = backend;
  testing::run_ranks(
      3,
      [&](ProcessGroup group, int rank) {
        group.barrier();
        if (rank == 1) {
          wait_for_collectives(2);
          // Both are now in the exchange of headers, unless they have only just begun.
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          const auto waiting = wait_for_collectives(2);
          EXPECT_EQ(waiting.size(), 2U);
          for (const auto& each : waiting) {
            EXPECT_STREQ(each.operation, "all_reduce");
            EXPECT_EQ(each.number, 2U);
            EXPECT_EQ(each.numel, 5);
            EXPECT_STREQ(each.tag.data(), "the purpose");
            EXPECT_EQ(each.size, 3);
            EXPECT_FALSE(each.begun_by_all);
            EXPECT_EQ(each.late_count, late_known);
            if (late_known == 1) EXPECT_EQ(each.late[0], 1);
          }
        }
        group.all_reduce(torch::ones({5}), 1, "the purpose");
        group.barrier();
      },
      options);
  EXPECT_EQ(wait_for_collectives(0).size(), 0U);
}

TEST(RunningCollectives, RanksThatWaitAreListedWithTheLateOne) {
  expect_one_late_rank(Backend::SharedMemory, 1);
}

TEST(RunningCollectives, OverMessagesTheLateRankIsNotKnown) {
  expect_one_late_rank(Backend::TCP, 0);
  expect_one_late_rank(Backend::Gloo, 0);
}

TEST(RunningCollectives, ALongTagIsCutAndMoreThanTheRoomIsLeftOut) {
  testing::run_ranks(2, [&](ProcessGroup group, int rank) {
    if (rank == 1) {
      const auto waiting = wait_for_collectives(1);
      EXPECT_EQ(waiting.size(), 1U);
      if (!waiting.empty()) EXPECT_EQ(std::string(waiting[0].tag.data()), std::string(95, 't'));
      EXPECT_EQ(detail::running_collectives(nullptr, 0), 0);
    }
    group.barrier(std::string(200, 't'));
  });
}

}  // namespace
}  // namespace tessera
