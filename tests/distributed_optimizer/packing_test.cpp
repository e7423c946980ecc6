#include "distributed_optimizer/packing.h"

#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace {

using namespace tessera::distributed_optimizer;
using ::testing::ElementsAre;

/// 8 tensors, then 14 float32 tensors of 400 bytes, with a float16 tensor of 100 bytes after the
/// 3rd, 6th and 9th of them.
struct Example {
  std::vector<PackItem> items;
  std::vector<size_t> order;
  Example() {
    for (int i = 0; i < 8; ++i) items.push_back({"float32", 4000});
    for (int i = 0; i < 14; ++i) {
      items.push_back({"float32", 400});
      if (i == 2 || i == 5 || i == 8) items.push_back({"float16", 100});
    }
    order.resize(items.size());
    std::iota(order.begin(), order.end(), size_t{0});
  }
};

TEST(Packing, APackIsClosedByTheItemThatExceedsTheThreshold) {
  const Example example;
  const auto packs = pack_by_arrival(example.items, example.order, 800);
  ASSERT_EQ(packs.size(), 8u + 4 + 2);
  for (size_t k = 0; k < 8; ++k) EXPECT_THAT(packs[k], ElementsAre(k));
  EXPECT_THAT(packs[8], ElementsAre(8, 9, 10));
  EXPECT_THAT(packs[9], ElementsAre(12, 13, 14));
  EXPECT_THAT(packs[10], ElementsAre(16, 17, 18));
  EXPECT_THAT(packs[11], ElementsAre(20, 21, 22));
  // The packs that are open in the end: float16 before float32.
  EXPECT_THAT(packs[12], ElementsAre(11, 15, 19));
  EXPECT_THAT(packs[13], ElementsAre(23, 24));
}

TEST(Packing, OneByteLessOfThresholdMakesSmallerPacks) {
  const Example example;
  const auto packs = pack_by_arrival(example.items, example.order, 799);
  ASSERT_EQ(packs.size(), 8u + 7 + 1);
  for (size_t k = 0; k < 8; ++k) EXPECT_THAT(packs[k], ElementsAre(k));
  EXPECT_THAT(packs[8], ElementsAre(8, 9));
  EXPECT_THAT(packs[9], ElementsAre(10, 12));
  EXPECT_THAT(packs[14], ElementsAre(23, 24));
  EXPECT_THAT(packs[15], ElementsAre(11, 15, 19));
}

TEST(Packing, FollowsTheOrderOfArrivalNotTheIndices) {
  const std::vector<PackItem> items(11, {"float32", 10});
  const auto packs = pack_by_arrival(items, {10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, 10);
  ASSERT_EQ(packs.size(), 10u);
  EXPECT_THAT(packs[0], ElementsAre(10));
  EXPECT_THAT(packs[8], ElementsAre(2, 1));
  EXPECT_THAT(packs[9], ElementsAre(0));
}

TEST(Packing, EmptyInputsAndThePacksAsText) {
  EXPECT_TRUE(pack_by_arrival({}, {}, 1).empty());
  const std::vector<PackItem> items(3, {"float32", 10});
  EXPECT_EQ(pack_by_arrival(items, {0, 1, 2}, 1).size(), 3u);
  const Packs packs{{3}, {0, 12, 1}, {2}};
  EXPECT_EQ(to_text(packs), "3 0,12,1 2");
  EXPECT_EQ(packs_from_text(to_text(packs)), packs);
  EXPECT_TRUE(packs_from_text("").empty());
}

}  // namespace
