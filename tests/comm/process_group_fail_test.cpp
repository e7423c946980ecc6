#include <chrono>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/ranks.h"
#include "tessera/step/agreement.h"

// ProcessGroup::fail(): one rank's mistake becomes a UsageError on every rank, soon.

namespace {

using tessera::Backend;
using tessera::ProcessGroup;
using tessera::UsageError;
using tessera::testing::message_of;
using tessera::testing::run_ranks_catching;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool is_usage_error(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const UsageError&) {
    return true;
  } catch (...) {
  }
  return false;
}

tessera::ProcessGroupOptions with(Backend backend) {
  tessera::ProcessGroupOptions options;
  options.backend = backend;
  return options;
}

TEST(ProcessGroupFail, ReachesAllRanksWhileCollectivesAreRunning) {
  const auto errors = run_ranks_catching(2, [](ProcessGroup group, int rank) {
    std::vector<tessera::Work> works;
    for (int i = 0; i < 20; ++i) works.push_back(group.all_reduce_async(at::ones({1000})));
    if (rank == 0) group.fail("rank 0 has had enough");
    for (auto& work : works) work.wait();
    group.barrier();
  });
  for (const auto& error : errors)
    EXPECT_THAT(message_of(error), HasSubstr("rank 0 has had enough"));
}

TEST(ProcessGroupFail, IsAnAgreedErrorSoThatOneRankCanPrintIt) {
  for (const auto backend : {Backend::SharedMemory, Backend::Gloo, Backend::TCP}) {
    for (const int world : {1, 2, 3, 4}) {
      const auto errors = run_ranks_catching(
          world,
          [](ProcessGroup group, int rank) {
            if (rank == 0) group.fail("rank 0 has had enough");
            group.barrier();
          },
          with(backend));
      for (const auto& error : errors) {
        EXPECT_THROW(std::rethrow_exception(error), tessera::AgreedError);
        EXPECT_EQ(message_of(error), "rank 0 has had enough");
      }
    }
  }
}

TEST(ProcessGroupFail, ReachesRanksThatWaitInASubGroup) {
  const auto start = std::chrono::steady_clock::now();
  const auto errors = run_ranks_catching(4, [](ProcessGroup group, int rank) {
    ProcessGroup pair = *group.split(rank / 2);
    auto tensor = at::ones({3});
    if (rank == 0) {
      pair.all_reduce(tensor);
      group.fail("rank 0 has had enough");
    }
    pair.all_reduce(tensor);
    if (rank == 1) pair.all_reduce(tensor);
    group.barrier();
  });
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 5);
  for (const int rank : {0, 1})
    EXPECT_EQ(message_of(errors[rank]), "rank 0 has had enough") << rank;
  for (const int rank : {2, 3})
    EXPECT_TRUE(errors[rank]) << rank << " waits for the whole group and must end, too";
}

TEST(ProcessGroupFail, RanksThatFailAtNearlyTheSameTimeAllGetAUsageErrorAtOnce) {
  for (const auto backend : {Backend::SharedMemory, Backend::Gloo, Backend::TCP}) {
    for (const int world : {2, 3, 4}) {
      for (int round = 0; round < 8; ++round) {
        const auto start = Clock::now();
        const auto errors = run_ranks_catching(
            world,
            [&](ProcessGroup group, int rank) {
              // A collective is under way on some ranks, not yet begun on others.
              auto work = group.all_reduce_async(at::ones({1000}));
              if ((rank + round) % 2 == 0) work.wait();
              std::this_thread::sleep_for(std::chrono::microseconds(rank * round * 50));
              // A rank that does not fail makes all calls, so that only fail() differs.
              const bool fails = rank < 2;
              auto next = fails && (rank + round) % 3 == 0
                              ? tessera::Work()
                              : group.all_reduce_async(at::ones({1000}));
              if (fails) group.fail("rank " + std::to_string(rank) + " has had enough");
              next.wait();
              group.barrier();
            },
            with(backend));
        EXPECT_LT(seconds_since(start), 5) << "world " << world << " round " << round;
        for (const auto& error : errors) {
          EXPECT_TRUE(is_usage_error(error))
              << "world " << world << " round " << round << ": " << message_of(error);
          EXPECT_THAT(message_of(error), HasSubstr("has had enough"));
        }
      }
    }
  }
}

TEST(ProcessGroupFail, ARankThatWasInformedMayFailItself) {
  for (const auto backend : {Backend::SharedMemory, Backend::Gloo, Backend::TCP}) {
    const auto start = Clock::now();
    const auto errors = run_ranks_catching(
        3,
        [&](ProcessGroup group, int rank) {
          if (rank == 0) group.fail("rank 0 has had enough");
          try {
            group.barrier();
          } catch (const UsageError& error) {
            group.fail(std::string("while waiting: ") + error.what());
          }
        },
        with(backend));
    EXPECT_LT(seconds_since(start), 5);
    for (const auto& error : errors) {
      EXPECT_TRUE(is_usage_error(error)) << message_of(error);
      EXPECT_THAT(message_of(error), HasSubstr("rank 0 has had enough"));
    }
  }
}

TEST(ProcessGroupFail, ARankThatWasInformedInASubGroupMayFailTheWholeGroup) {
  const auto start = Clock::now();
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    ProcessGroup pair = *group.split(0);
    if (rank == 0) group.fail("rank 0 has had enough");
    try {
      pair.barrier();
    } catch (const UsageError& error) {
      std::this_thread::sleep_for(std::chrono::seconds(1));  // rank 0 has left
      group.fail(std::string("while waiting: ") + error.what());
    }
  });
  EXPECT_LT(seconds_since(start), 5);
  for (const auto& error : errors) {
    EXPECT_TRUE(is_usage_error(error)) << message_of(error);
    EXPECT_THAT(message_of(error), HasSubstr("rank 0 has had enough"));
  }
}

}  // namespace
