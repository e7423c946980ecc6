#include "comm/base/roll_call.h"

#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// Records for which keys each thread asks.
struct AskedStore : c10d::HashStore {
  std::vector<uint8_t> get(const std::string& key) override {
    {
      std::lock_guard lock(mutex);
      asked[std::this_thread::get_id()].insert(key);
    }
    return HashStore::get(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    {
      std::lock_guard lock(mutex);
      asked[std::this_thread::get_id()].insert(keys.begin(), keys.end());
    }
    return HashStore::check(keys);
  }
  std::mutex mutex;
  std::map<std::thread::id, std::set<std::string>> asked;
};

TEST(RollCall, EachRankAsksForTheLogarithmOfTheRanks) {
  for (const int size : {1, 2, 3, 5, 8, 33}) {
    SCOPED_TRACE(size);
    const auto store = c10::make_intrusive<AskedStore>();
    std::vector<std::thread> threads;
    std::atomic<int> complete{0};
    for (int rank = 0; rank < size; ++rank)
      threads.emplace_back([&, rank] {
        const auto all =
            roll_call(store, "x", rank, size, "v " + std::to_string(rank), Clock::now() + 20s);
        bool right = static_cast<int>(all.size()) == size;
        for (const auto& [other, presence] : all)
          right = right && presence.size == size && presence.value == "v " + std::to_string(other);
        complete += right;
      });
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(complete, size);
    size_t most = 1;
    for (int span = 1; span < size; span *= 2) ++most;  // ceil(log2 size) + 1
    for (const auto& [thread, keys] : store->asked) EXPECT_LE(keys.size(), most);
  }
}

TEST(RollCall, RanksThatWereToldAnotherSizeAreKnownToAll) {
  for (const auto& sizes :
       std::vector<std::vector<int>>{{3, 4, 3}, {4, 2}, {2, 4, 4, 4}, {4, 4, 3}}) {
    SCOPED_TRACE(::testing::PrintToString(sizes));
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::future<bool>> noticed;
    for (int rank = 0; rank < static_cast<int>(sizes.size()); ++rank)
      noticed.push_back(std::async(std::launch::async, [=] {
        for (const auto& [other, presence] :
             roll_call(store, "x", rank, sizes[rank], "", Clock::now() + 20s))
          if (presence.size != sizes[rank]) return true;
        return false;
      }));
    for (auto& one : noticed) EXPECT_TRUE(one.get());
  }
}

}  // namespace
}  // namespace tessera::comm
