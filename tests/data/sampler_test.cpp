#include "tessera/data/sampler.h"

#include <limits>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "data/permutation.h"
#include "harness/thrown_by.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::thrown_by;

TEST(Sampler, SequentialContinuesBeyondTheEnd) {
  EXPECT_THAT(Sampler(3, SampleOrder::sequential).samples(1, 4), ElementsAre(1, 2, 3, 4));
  const int64_t far = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(Sampler(3, SampleOrder::sequential).sample(far), far);
}

TEST(Sampler, ShuffledVisitsEverySampleOnceInEachEpoch) {
  for (const int64_t size : {1, 2, 3, 64, 101}) {
    const Sampler sampler(size, SampleOrder::shuffled, 3);
    std::set<std::vector<int64_t>> orders;
    for (int64_t epoch = 0; epoch < 4; ++epoch) {
      const std::vector<int64_t> order = sampler.samples(epoch * size, size);
      const std::set<int64_t> seen(order.begin(), order.end());
      ASSERT_EQ(static_cast<int64_t>(seen.size()), size);
      EXPECT_GE(*seen.begin(), 0);
      EXPECT_LT(*seen.rbegin(), size);
      orders.insert(order);
    }
    if (size > 3) EXPECT_EQ(orders.size(), 4u) << "two epochs have the same order";
  }
  EXPECT_NE(Sampler(100, SampleOrder::shuffled, 1).samples(0, 100),
            Sampler(100, SampleOrder::shuffled, 2).samples(0, 100));
  EXPECT_EQ(Sampler(100, SampleOrder::shuffled, 1).samples(50, 100),
            Sampler(100, SampleOrder::shuffled, 1).samples(50, 100));
}

// Later versions must be able to resume saved runs, so the order is part of the format.
TEST(Sampler, TheOrderOfASeedNeverChanges) {
  EXPECT_THAT(Sampler(10, SampleOrder::shuffled, 42).samples(0, 20),
              ElementsAre(7, 9, 5, 2, 6, 8, 1, 3, 0, 4,  //
                          1, 7, 9, 2, 0, 5, 6, 8, 4, 3));
}

TEST(Permutation, IsABijectionForEverySizeAndSpreadsEvenly) {
  for (uint64_t size = 1; size < 200; ++size) {
    std::set<uint64_t> seen;
    for (uint64_t i = 0; i < size; ++i) {
      const uint64_t image = permuted_index(i, size, size * 77);
      ASSERT_LT(image, size);
      seen.insert(image);
    }
    ASSERT_EQ(seen.size(), size);
  }
  // Over many keys, each of 16 elements is mapped to each place about equally often.
  int counts[16][16] = {};
  for (uint64_t key = 0; key < 4000; ++key)
    for (uint64_t i = 0; i < 16; ++i) ++counts[i][permuted_index(i, 16, mix_bits(key))];
  for (const auto& row : counts)
    for (const int count : row) EXPECT_NEAR(count, 250, 100);
}

TEST(Sampler, ALoadedStateContinuesAtItsPosition) {
  Sampler sampler(10, SampleOrder::shuffled, 4);
  EXPECT_EQ(sampler.position(), 0);
  sampler.seek(29);
  EXPECT_EQ(sampler.epoch(), 2);
  sampler.seek(30);
  EXPECT_EQ(sampler.epoch(), 3);
  Sampler other(10, SampleOrder::shuffled, 4);
  other.load_state(sampler.state());
  EXPECT_EQ(other.position(), 30);
  EXPECT_EQ(other.sample(31), sampler.sample(31));
  Sampler sequential(10, SampleOrder::sequential, 4);
  sequential.load_state({7, 10, SampleOrder::sequential, 5});  // sequential ignores the seed
  EXPECT_EQ(sequential.position(), 7);
}

TEST(Sampler, RefusesAStateOfOtherDataNamingBothValues) {
  Sampler sampler(10, SampleOrder::shuffled, 4);
  sampler.seek(3);
  const auto load = [&](const SamplerState& state) {
    return thrown_by([&] { sampler.load_state(state); });
  };
  EXPECT_THAT(load({5, 11, SampleOrder::shuffled, 4}),
              AllOf(HasSubstr("size 11"), HasSubstr("size 10")));
  EXPECT_THAT(load({5, 10, SampleOrder::sequential, 4}),
              AllOf(HasSubstr("order sequential"), HasSubstr("order shuffled")));
  EXPECT_THAT(load({5, 10, SampleOrder::shuffled, 6}),
              AllOf(HasSubstr("seed 6"), HasSubstr("seed 4")));
  EXPECT_THAT(load({-5, 10, SampleOrder::shuffled, 4}), HasSubstr("position is -5"));
  EXPECT_EQ(sampler.position(), 3);
  EXPECT_THAT(thrown_by([] { Sampler(0); }), HasSubstr("size is 0"));
  EXPECT_THAT(thrown_by([&] { sampler.seek(-1); }), HasSubstr("position is -1"));
  EXPECT_THAT(thrown_by([&] { sampler.sample(-1); }), HasSubstr("sample number is -1"));
}

}  // namespace
}  // namespace tessera
