#include "comm/p2p/liveness.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "harness/ranks.h"

namespace {

using namespace std::chrono_literals;
using tessera::BrokenWorldError;
using tessera::ProcessGroup;
using tessera::comm::Liveness;
using tessera::testing::message_of;
using tessera::testing::run_ranks_catching;
using tessera::testing::run_ranks_on;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Clock = std::chrono::steady_clock;

constexpr auto kSilence = 400ms;

/// What a Liveness object has found.
class Loss {
 public:
  Liveness::OnLoss recorder() {
    return [this](const std::vector<int>& lost) {
      std::lock_guard lock(mutex_);
      ranks_ = lost;
      changed_.notify_all();
    };
  }
  std::optional<std::vector<int>> within(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit, [this] { return ranks_.has_value(); });
    return ranks_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<std::vector<int>> ranks_;
};

struct CountingStore : c10d::HashStore {
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++calls;
    HashStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    ++calls;
    return HashStore::get(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    ++calls;
    return HashStore::check(keys);
  }
  std::atomic<int> calls{0};
};

/// A store whose server does not run.
struct SilentStore : c10d::HashStore {
  void set(const std::string&, const std::vector<uint8_t>&) override {
    std::this_thread::sleep_for(4s);
  }
};

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

Liveness one_of(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Loss& loss,
                std::chrono::milliseconds entry = 20s) {
  return Liveness(store, rank, size, 1, {kSilence, entry}, loss.recorder());
}

TEST(Liveness, RanksThatRunAreNotLostAndOneThatLeavesIsNot) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Loss losses[3];
  const auto zero = one_of(store, 0, 3, losses[0]), one = one_of(store, 1, 3, losses[1]);
  {
    const auto two = one_of(store, 2, 3, losses[2]);
    EXPECT_FALSE(losses[0].within(3 * kSilence));
    EXPECT_FALSE(zero.is_silent(1));
  }
  EXPECT_FALSE(losses[0].within(3 * kSilence)) << "rank 2 has left";
  EXPECT_FALSE(losses[1].within(0ms));
  EXPECT_FALSE(losses[2].within(0ms));
  EXPECT_FALSE(zero.is_silent(2));
}

TEST(Liveness, ARankWhoseNumberStaysTheSameIsLostAfterTheLimit) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->set("running/2", bytes("1 7"));
  Loss losses[2];
  const auto start = Clock::now();
  const auto zero = one_of(store, 0, 3, losses[0]), one = one_of(store, 1, 3, losses[1]);
  for (auto& loss : losses) EXPECT_THAT(*loss.within(10s), ElementsAre(2));
  EXPECT_GE(Clock::now() - start, kSilence);
  EXPECT_TRUE(zero.is_silent(2));
  EXPECT_FALSE(zero.is_silent(1));
}

TEST(Liveness, ARankThatComesLaterIsNotLostAndOneThatNeverComesIsAfterTheLimitForThat) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->set("running/1", bytes("0 -1"));  // of an earlier object
  Loss first, second;
  const auto start = Clock::now();
  const auto zero = one_of(store, 0, 2, first, 1500ms);
  EXPECT_FALSE(first.within(2 * kSilence));
  {
    const auto one = one_of(store, 1, 2, second);
    EXPECT_FALSE(first.within(1500ms));
  }
  Loss third;
  const auto alone = one_of(c10::make_intrusive<c10d::HashStore>(), 0, 2, third, 800ms);
  EXPECT_THAT(*third.within(10s), ElementsAre(1));
  EXPECT_GE(Clock::now() - start, 800ms);
}

TEST(Liveness, AStoreThatDoesNotAnswerIsFoundAndHoldsNobodyUp) {
  Loss loss;
  const auto start = Clock::now();
  {
    const auto zero = one_of(c10::make_intrusive<SilentStore>(), 0, 2, loss);
    EXPECT_THAT(*loss.within(10s), IsEmpty());
    EXPECT_TRUE(zero.is_silent(1));
  }
  EXPECT_LT(Clock::now() - start, 3s) << "the call of the store lasts longer";
}

TEST(Liveness, AShortWaitCostsAtMostTwoMessagesAndALongOneAFewForEachBeat) {
  const auto store = c10::make_intrusive<CountingStore>();
  Loss loss;
  { const auto zero = one_of(store, 0, 2, loss); }
  EXPECT_GE(store->calls, 1);
  EXPECT_LE(store->calls, 2);
  store->calls = 0;
  const auto start = Clock::now();
  {
    const auto zero = one_of(store, 0, 4, loss);
    std::this_thread::sleep_for(kSilence);
  }
  const auto beats = 2 + (Clock::now() - start) / Liveness::beat(kSilence);
  EXPECT_GE(store->calls, 8);
  EXPECT_LE(store->calls, 4 * beats + 1);
}

TEST(Liveness, InALargeGroupEachRankLooksAtFewAndEachRankIsLookedAt) {
  EXPECT_EQ(Liveness::beat(60s), 500ms);
  EXPECT_THAT(Liveness::watched_by(2, 4), ElementsAre(3, 0, 1));
  EXPECT_EQ(Liveness::watched_by(0, 9).size(), 8U);
  EXPECT_EQ(Liveness::watched_by(5, 256).size(), 12U);
}

// Groups, whose ranks are threads.

const std::vector<std::vector<int>> kPlacements{{0, 1}, {0, 1, 2}, {0, 0, 1, 1}, {0, 1, 1, 0}};

TEST(LivenessOfAGroup, ARankThatIsBusyOutsideOfCollectivesIsNotLost) {
  for (const auto& hosts : kPlacements) {
    run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
      auto half = *group.split(rank == 0 ? 0 : 1);
      for (auto& tested : {group, half}) {
        ProcessGroup raised = tested;
        raised.set_timeout(20s, kSilence);
        if (rank == 1) std::this_thread::sleep_for(2 * kSilence);
        auto sum = at::ones({3});
        raised.all_reduce(sum);
        ASSERT_EQ(sum[0].item<int>(), raised.size());
        raised.set_timeout(20s);
      }
      group.barrier();
    });
  }
}

TEST(LivenessOfAGroup, ARankThatDoesNotShowThatItRunsIsNamedByAllInTheTextOfATimeOut) {
  for (const auto& hosts : kPlacements) {
    const int last = static_cast<int>(hosts.size()) - 1;
    std::atomic<int> gave_up{0};
    const auto errors = run_ranks_catching(
        last + 1,
        [&](ProcessGroup group, int rank) {
          group.barrier();
          group.set_timeout(600ms);  // the time to come to the next call
          if (rank == last) {
            while (gave_up < last) std::this_thread::sleep_for(5ms);
            return;
          }
          struct Count {
            std::atomic<int>& n;
            ~Count() { ++n; }
          } count{gave_up};
          group.set_timeout(60s, kSilence);
          group.all_reduce(at::ones({3}));
        },
        {}, hosts);
    for (int rank = 0; rank < last; ++rank) {
      EXPECT_THAT(message_of(errors[rank]),
                  HasSubstr("rank " + std::to_string(last) + " did not arrive within 400 ms"))
          << ::testing::PrintToString(hosts) << " on rank " << rank;
    }
  }
}

TEST(LivenessOfAGroup, AGroupThatEndsWhileItsTimeOutIsRaisedEndsAtOnce) {
  const auto start = Clock::now();
  run_ranks_on({0, 0, 1}, [](ProcessGroup group, int) {
    group.set_timeout(1h, 30min);
    group.barrier();
  });
  EXPECT_LT(Clock::now() - start, 5s);
}

}  // namespace
