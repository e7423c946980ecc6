#include "comm/failures/failure_ledger.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace {

using namespace std::chrono_literals;
using tessera::comm::FailureLedger;
using ::testing::ElementsAre;
using Cause = FailureLedger::Cause;

constexpr int kRanks = 4;

/// Rank `rank` gives up because `missed` is missing.
struct GivesUp {
  int rank;
  int missed;
  Cause cause = Cause::late;
};

std::vector<int> resolve(const c10::intrusive_ptr<c10d::Store>& store, const GivesUp& call) {
  auto world = tessera::comm::World::start(call.rank, kRanks, {});
  world.store = store;
  return FailureLedger(world, 700ms).resolve({call.missed}, call.cause);
}

/// The ranks that each rank blames when the ranks give up in this order. Each gives up when the one
/// before has written its first record and had 20 ms to read the others'.
std::map<int, std::vector<int>> blamed_by(const std::vector<GivesUp>& calls) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::map<int, std::vector<int>> blamed;
  for (const auto& call : calls) blamed[call.rank];
  std::vector<std::thread> threads;
  for (const auto& call : calls) {
    threads.emplace_back([&] { blamed.at(call.rank) = resolve(store, call); });
    while (!store->check({"failed/" + std::to_string(call.rank)})) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(20ms);
  }
  for (auto& thread : threads) thread.join();
  return blamed;
}

TEST(FailureLedger, AChainOfWaitersBlamesTheSilentRankInAnyOrderOfGivingUp) {
  // 3 waits for 0, 0 for 1, and 1 for 2, which is stopped.
  const GivesUp three{3, 0}, zero{0, 1}, one{1, 2};
  for (const auto& order : {std::vector{three, zero, one}, std::vector{one, zero, three},
                            std::vector{zero, three, one}})
    for (const auto& [rank, ranks] : blamed_by(order)) EXPECT_THAT(ranks, ElementsAre(2)) << rank;
}

TEST(FailureLedger, ARankThatClosesItsConnectionBeforeWritingItsRecordIsNotBlamed) {
  for (const auto& [rank, ranks] :
       blamed_by({{0, 1, Cause::gone_near_the_time_out}, {1, 2}, {3, 0}}))
    EXPECT_THAT(ranks, ElementsAre(2)) << rank;
  // Rank 0 has its result before rank 1 writes its first record.
  const auto store = c10::make_intrusive<c10d::HashStore>();
  resolve(store, {0, 1, Cause::gone});
  EXPECT_THAT(resolve(store, {1, 2}), ElementsAre(2));
}

TEST(FailureLedger, AStoppedRankThatContinuesBeforeTheOthersHaveDecidedIsStillBlamed) {
  for (const auto& [rank, ranks] : blamed_by({{0, 1}, {1, 2}, {2, 0}}))
    EXPECT_THAT(ranks, ElementsAre(2)) << rank;
}

TEST(FailureLedger, AStoppedRankThatContinuesAfterwardsBlamesItselfAndChangesNoVerdict) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(resolve(store, {1, 2}), ElementsAre(2));
  EXPECT_THAT(resolve(store, {2, 3}), ElementsAre(2));
  EXPECT_THAT(resolve(store, {0, 1, Cause::gone}), ElementsAre(2));
}

TEST(FailureLedger, APeerThatIsGoneIsBlamedAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  for (const auto& [rank, ranks] : blamed_by({{0, 2, Cause::gone}, {1, 0, Cause::gone}}))
    EXPECT_THAT(ranks, ElementsAre(2)) << rank;
  EXPECT_LT(std::chrono::steady_clock::now() - start, 500ms);
}

/// A store whose server is stopped.
struct SilentStore : c10d::HashStore {
  bool check(const std::vector<std::string>&) override {
    std::this_thread::sleep_for(6s);
    return false;
  }
};

/// The store of a stopped rank, which serves it: the others' first writes arrive, no reads.
struct StoppedServer : SilentStore {
  bool check(const std::vector<std::string>& keys) override {
    return stopped ? SilentStore::check(keys) : HashStore::check(keys);
  }
  std::atomic<bool> stopped{true};
};

TEST(FailureLedger, AStoppedRankThatServesTheStoreBlamesItselfWhenItContinues) {
  for (const auto cause : {Cause::gone, Cause::overdue}) {
    const auto store = c10::make_intrusive<StoppedServer>();
    EXPECT_THAT(resolve(store, {1, 0}), ElementsAre(0));
    store->stopped = false;
    EXPECT_THAT(resolve(store, {0, 1, cause}), ElementsAre(0));
  }
}

TEST(FailureLedger, AStoppedServerThatWasMissedThroughOtherRanksBlamesItself) {
  const auto store = c10::make_intrusive<StoppedServer>();
  EXPECT_THAT(resolve(store, {1, 2}), ElementsAre(2));  // 2 waits for 0
  store->stopped = false;
  auto world = tessera::comm::World::start(0, kRanks, {});
  world.store = store;
  world.start_group.rank_0_serves = true;
  EXPECT_THAT(FailureLedger(world, 10ms).resolve({2}, Cause::overdue), ElementsAre(0));
}

TEST(FailureLedger, AStoppedServerWhoseOwnTimeOutHasJustPassedBlamesItself) {
  const auto store = c10::make_intrusive<StoppedServer>();
  resolve(store, {1, 0});
  store->stopped = false;
  auto world = tessera::comm::World::start(0, kRanks, {});
  world.store = store;
  world.start_group.rank_0_serves = true;
  EXPECT_THAT(FailureLedger(world, 300ms).resolve({2}, Cause::late), ElementsAre(0));
}

TEST(FailureLedger, ARankWhoseWaiterCouldRecordItsVerdictIsNotBlamedForTheWait) {
  // 1 waits for 0, which waits for 2.
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(blamed_by({{1, 0}, {0, 2}}).at(1), ElementsAre(2));
  resolve(store, {0, 2});
  EXPECT_THAT(resolve(store, {1, 0}), ElementsAre(2));
  EXPECT_THAT(resolve(store, {0, 1, Cause::gone}), ElementsAre(2));
}

TEST(FailureLedger, AStoreThatDoesNotAnswerBlamesTheRankThatServesItIfThatIsKnown) {
  auto world = tessera::comm::World::start(3, kRanks, {});
  world.store = c10::make_intrusive<SilentStore>();
  EXPECT_THAT(FailureLedger(world, 10ms).resolve({1}, Cause::late), ElementsAre(1));
  world.start_group.rank_0_serves = true;
  EXPECT_THAT(FailureLedger(world, 10ms).resolve({1}, Cause::late), ElementsAre(0));
  // The ranks of a host see each other.
  EXPECT_THAT(FailureLedger(world, 10ms).resolve({1}, Cause::late_here), ElementsAre(1));
}

TEST(FailureLedger, AStoreThatDoesNotAnswerDelaysNoRank) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(resolve(c10::make_intrusive<SilentStore>(), {1, 0}), ElementsAre(0));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 3s);
}

TEST(FailureLedger, TheGroupsOfAProcessWaitForASilentStoreOnce) {
  auto world = tessera::comm::World::start(1, kRanks, {});
  world.store = c10::make_intrusive<SilentStore>();
  world.failures = std::make_shared<tessera::comm::ProcessFailures>();
  auto sub_group = world;
  const auto start = std::chrono::steady_clock::now();
  FailureLedger(world, 700ms).resolve({0}, Cause::late);
  const auto first = std::chrono::steady_clock::now();
  EXPECT_LT(first - start, 1500ms) << "the grace is not for stores that do not answer";
  for (int i = 0; i < 3; ++i) FailureLedger(sub_group, 700ms).resolve({0}, Cause::late);
  EXPECT_LT(std::chrono::steady_clock::now() - first, 800ms);
}

/// The store of a rank that was killed.
struct LostStore : c10d::HashStore {
  int64_t add(const std::string&, int64_t) override { throw std::runtime_error("closed"); }
  bool check(const std::vector<std::string>&) override { throw std::runtime_error("closed"); }
};

std::vector<int> resolve_without_store(bool rank_0_serves, int missed) {
  auto world = tessera::comm::World::start(3, kRanks, {});
  world.store = c10::make_intrusive<LostStore>();
  world.start_group.rank_0_serves = rank_0_serves;
  return FailureLedger(world, 700ms).resolve({missed}, Cause::gone);
}

TEST(FailureLedger, ALostStoreBlamesTheRankThatServesIt) {
  EXPECT_THAT(resolve_without_store(true, 1), ElementsAre(0));
  EXPECT_THAT(resolve_without_store(true, 0), ElementsAre(0));
  EXPECT_THAT(resolve_without_store(false, 1), ElementsAre(1));
}

TEST(FailureLedger, TheRankThatServesTheStoreWaitsForTheRecordsOfTheOthers) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto world = tessera::comm::World::start(0, kRanks, {});
  world.store = store;
  world.start_group.rank_0_serves = true;
  std::thread late([&] {
    std::this_thread::sleep_for(100ms);
    for (const int rank : {1, 3}) resolve(store, {rank, 2, Cause::gone});
  });
  EXPECT_THAT(FailureLedger(world).resolve({2}, Cause::gone), ElementsAre(2));
  for (const int rank : {1, 3}) EXPECT_TRUE(store->check({fmt::format("failed/{}", rank)}));
  late.join();
  // Nobody else writes: the wait is bounded.
  const auto start = std::chrono::steady_clock::now();
  world.store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(FailureLedger(world).resolve({2}, Cause::gone), ElementsAre(2));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 900ms);
}

/// One process of a start-up group and its sub-group with these members.
struct Process {
  Process(const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::vector<int>& members,
          bool rank_0_serves = false) {
    main = tessera::comm::World::start(rank, kRanks, {});
    main.start_group.rank_0_serves = rank_0_serves;
    main.failures = std::make_shared<tessera::comm::ProcessFailures>();
    main.start_group.store = store;
    sub = main;
    main.store = c10::make_intrusive<c10d::PrefixStore>("main/", store);
    sub.store = c10::make_intrusive<c10d::PrefixStore>("sub/", store);
    sub.world_ranks = members;
    sub.size = static_cast<int>(members.size());
    sub.rank = static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
    main.failures->add(main);
    main.failures->add(sub);
  }

  tessera::comm::World main, sub;
};

std::vector<int> gone(const tessera::comm::World& group, int member) {
  return FailureLedger(group).resolve({member}, Cause::gone);
}

TEST(ProcessFailures, ARankThatLeavesBecauseAnotherGroupFailedIsNotBlamed) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Process zero(store, 0, {0, 2, 3}), one(store, 1, {1, 3});
  EXPECT_THAT(gone(zero.sub, 1), ElementsAre(1));
  zero.main.failures->tell_others(zero.sub, {2});
  EXPECT_THAT(gone(one.main, 0), ElementsAre(2));
}

TEST(ProcessFailures, AGroupWithoutTheLostRankIsNotTold) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Process zero(store, 0, {0, 1}), one(store, 1, {0, 1});
  zero.main.failures->tell_others(zero.main, {2});
  EXPECT_THAT(gone(one.sub, 0), ElementsAre(0));
}

TEST(ProcessFailures, AnOwnFailureOfAGroupIsKept) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Process zero(store, 0, {0, 1, 2, 3}), one(store, 1, {0, 1, 2, 3});
  EXPECT_THAT(gone(zero.main, 3), ElementsAre(3));
  zero.main.failures->tell_others(zero.sub, {2});
  EXPECT_THAT(gone(one.main, 0), ElementsAre(3));
}

TEST(ProcessFailures, AProcessThatGoesOnInAGroupIsBlamedThereForLeaving) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Process zero(store, 0, {0, 2, 3}), one(store, 1, {1, 3});
  zero.main.failures->tell_others(zero.sub, {2});
  zero.main.failures->withdraw(zero.main);
  EXPECT_THAT(gone(one.main, 0), ElementsAre(0));
}

TEST(ProcessFailures, AGroupThatHasEndedIsNotTold) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Process zero(store, 0, {0, 2, 3});
  zero.main.failures->remove(zero.main);
  zero.main.failures->tell_others(zero.sub, {2});
  EXPECT_FALSE(zero.main.store->check({"failed/0"}));
}

TEST(ProcessFailures, TheStoreIsServedUntilTheOthersHaveTheirRecords) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const bool serves : {true, false}) {
    auto zero = std::make_unique<Process>(store, 0, std::vector{0, 2, 3}, serves);
    zero->main.failures->tell_others(zero->sub, {2});
    const auto start = std::chrono::steady_clock::now();
    std::thread late([&] {
      std::this_thread::sleep_for(100ms);
      for (const int rank : {1, 3}) gone(Process(store, rank, {1, 3}).main, 0);
    });
    zero.reset();
    const auto waited = std::chrono::steady_clock::now() - start;
    EXPECT_EQ(waited > 90ms, serves);
    EXPECT_LT(waited, 450ms);
    late.join();
    store->deleteKey("main/failed/1");
    store->deleteKey("main/failed/3");
  }
}

TEST(ProcessFailures, AStoppedServerThatWasMissedInAnotherGroupBlamesItself) {
  for (const auto cause :
       {Cause::gone, Cause::gone_near_the_time_out, Cause::late, Cause::overdue}) {
    const auto store = c10::make_intrusive<StoppedServer>();
    Process zero(store, 0, {0, 1}, true), one(store, 1, {0, 1}, true);
    EXPECT_THAT(FailureLedger(one.sub, 10ms).resolve({0}, Cause::late), ElementsAre(0));
    store->stopped = false;
    EXPECT_THAT(FailureLedger(zero.main, 100ms).resolve({3}, cause), ElementsAre(0));
  }
}

TEST(ProcessFailures, ARankThatTheStoreAnswersTakesItsNoteBack) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Process zero(store, 0, {0, 1}, true), one(store, 1, {0, 1}, true);
  EXPECT_THAT(FailureLedger(one.sub, 10ms).resolve({0}, Cause::late), ElementsAre(0));
  EXPECT_THAT(FailureLedger(zero.main, 10ms).resolve({3}, Cause::late), ElementsAre(3));
}

TEST(ProcessFailures, AStoreThatDoesNotAnswerDelaysNoRank) {
  Process zero(c10::make_intrusive<SilentStore>(), 0, {0, 2, 3});
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 3; ++i) zero.main.failures->tell_others(zero.sub, {2});
  EXPECT_LT(std::chrono::steady_clock::now() - start, 1900ms);
}

}  // namespace
