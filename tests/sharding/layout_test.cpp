#include "sharding/layout.h"

#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace {

using tessera::assign_owners;
using tessera::Partition;
using tessera::sharding::Layout;
using tessera::sharding::LayoutSlice;
using ::testing::ElementsAre;

using Sizes = std::vector<int64_t>;

Sizes sizes_of_rank(const Sizes& sizes, const std::vector<int>& owners, int rank) {
  Sizes result;
  for (size_t i = 0; i < sizes.size(); ++i)
    if (owners[i] == rank) result.push_back(sizes[i]);
  return result;
}

TEST(AssignOwners, LargestFirstToTheLeastLoaded) {
  Sizes load(2, 0);
  const Sizes sizes{4, 3, 2, 1};
  const auto owners = assign_owners(sizes, load, Partition::whole);
  EXPECT_THAT(sizes_of_rank(sizes, owners, 0), ElementsAre(4, 1));
  EXPECT_THAT(sizes_of_rank(sizes, owners, 1), ElementsAre(3, 2));
  EXPECT_THAT(load, ElementsAre(5, 5));
}

TEST(AssignOwners, CopiesOfOneGroupBalanceExactly) {
  for (int world = 1; world <= 8; ++world) {
    Sizes sizes, load(world, 0);
    for (int copy = 0; copy < world; ++copy) sizes.insert(sizes.end(), {9, 7, 5, 3});
    const auto owners = assign_owners(sizes, load, Partition::whole);
    for (int rank = 0; rank < world; ++rank) {
      auto own = sizes_of_rank(sizes, owners, rank);
      std::sort(own.begin(), own.end());
      EXPECT_EQ(own, (Sizes{3, 5, 7, 9})) << world << " ranks, rank " << rank;
      EXPECT_EQ(load[rank], 24);
    }
  }
}

TEST(AssignOwners, FirstFitKeepsTheOrderOfRegistration) {
  Sizes load(2, 0);
  EXPECT_THAT(assign_owners({1, 9, 1, 9}, load, Partition::first_fit), ElementsAre(0, 1, 0, 0));
  EXPECT_THAT(load, ElementsAre(11, 9));
  Sizes sorted(2, 0);
  EXPECT_THAT(assign_owners({1, 9, 1, 9}, sorted, Partition::whole), ElementsAre(0, 0, 1, 1));
}

TEST(AssignOwners, LoadCarriesOverGroupsAndTiesGoToTheLowestRank) {
  Sizes load(3, 0);
  EXPECT_THAT(assign_owners({5}, load, Partition::whole), ElementsAre(0));
  EXPECT_THAT(assign_owners({5}, load, Partition::whole), ElementsAre(1));
  EXPECT_THAT(assign_owners({1, 1}, load, Partition::whole), ElementsAre(2, 2));
}

/// All that any layout promises, checked element by element.
void expect_sound(const Layout& layout, const Sizes& sizes, int world) {
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  ASSERT_EQ(layout.numel(), total);
  ASSERT_EQ(layout.world(), world);
  ASSERT_EQ(std::accumulate(layout.counts().begin(), layout.counts().end(), int64_t{0}), total);
  std::vector<std::vector<int>> owner_of(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) owner_of[i].assign(sizes[i], -1);
  int64_t next = 0;
  for (int rank = 0; rank < world; ++rank) {
    ASSERT_EQ(layout.segment_begin(rank), next);
    for (const auto& shard : layout.slices(rank)) {
      ASSERT_GT(shard.numel, 0);
      ASSERT_EQ(shard.offset, next) << "no gaps, ascending";
      ASSERT_EQ(shard.offset, layout.offset(shard.tensor) + shard.begin) << "a tensor is one run";
      for (int64_t e = shard.begin; e < shard.begin + shard.numel; ++e) {
        ASSERT_EQ(owner_of[shard.tensor].at(e), -1) << "held once";
        owner_of[shard.tensor][e] = rank;
      }
      next += shard.numel;
    }
    ASSERT_EQ(next, layout.segment_begin(rank) + layout.counts()[rank]);
  }
  for (const auto& owners : owner_of)
    ASSERT_EQ(std::count(owners.begin(), owners.end(), -1), 0) << "held at all";
}

/// Every list of up to four sizes from {0, 1, 2, 3, 5, 9} on every world up to 6.
template <class Check>
void for_every_case(Check check) {
  const Sizes choices{0, 1, 2, 3, 5, 9};
  for (int world = 1; world <= 6; ++world) {
    for (int length = 0; length <= 4; ++length) {
      int64_t cases = 1;
      for (int i = 0; i < length; ++i) cases *= choices.size();
      for (int64_t n = 0; n < cases; ++n) {
        Sizes sizes;
        for (int64_t rest = n, i = 0; i < length; ++i, rest /= choices.size())
          sizes.push_back(choices[rest % choices.size()]);
        check(sizes, world);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(Layout, FlatIsSoundAndEqual) {
  for_every_case([](const Sizes& sizes, int world) {
    const auto layout = Layout::flat(sizes, world);
    expect_sound(layout, sizes, world);
    const int64_t part = (layout.numel() + world - 1) / world;
    for (const auto count : layout.counts()) ASSERT_LE(count, part);
  });
}

TEST(Layout, OwnedIsSoundAndKeepsTensorsWhole) {
  for_every_case([](const Sizes& sizes, int world) {
    for (const auto partition : {Partition::whole, Partition::first_fit}) {
      Sizes load(world, 0);
      const auto owners = assign_owners(sizes, load, partition);
      const auto layout = Layout::owned(sizes, owners, world);
      expect_sound(layout, sizes, world);
      ASSERT_EQ(layout.counts(), load);
      for (int rank = 0; rank < world; ++rank) {
        for (const auto& shard : layout.slices(rank)) {
          ASSERT_EQ(shard.numel, sizes[shard.tensor]);
          ASSERT_EQ(owners[shard.tensor], rank);
        }
      }
    }
  });
}

TEST(Layout, UnevenModelOnFewRanks) {
  const auto layout = Layout::flat({9, 1, 7}, 2);
  EXPECT_THAT(layout.counts(), ElementsAre(9, 8));
  EXPECT_THAT(layout.slices(0), ElementsAre(LayoutSlice{0, 0, 9, 0}));
  EXPECT_THAT(layout.slices(1), ElementsAre(LayoutSlice{1, 0, 1, 9}, LayoutSlice{2, 0, 7, 10}));
  EXPECT_THAT(Layout::flat({1, 1}, 4).counts(), ElementsAre(1, 1, 0, 0));
}

}  // namespace
