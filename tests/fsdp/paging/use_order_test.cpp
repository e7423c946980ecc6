#include "fsdp/paging/use_order.h"

#include <gtest/gtest.h>

namespace {

using tessera::fsdp::Phase;
using tessera::fsdp::UseOrder;

void walk(UseOrder& order, std::initializer_list<size_t> forward,
          std::initializer_list<size_t> backward) {
  for (const auto unit : forward) order.touch(unit, Phase::forward);
  for (const auto unit : backward) order.touch(unit, Phase::backward);
}

TEST(UseOrder, PredictsNothingInTheFirstStep) {
  UseOrder order(3);
  EXPECT_TRUE(order.touch(1, Phase::forward));
  EXPECT_FALSE(order.touch(1, Phase::forward));
  EXPECT_FALSE(order.next().has_value());
  EXPECT_EQ(order.next_use(1), UseOrder::kNever);
  EXPECT_FALSE(order.follows_record());
}

TEST(UseOrder, PredictsTheSecondStepFromTheFirst) {
  UseOrder order(3);
  walk(order, {0, 1, 2}, {2, 1, 0});
  order.end_step();
  order.touch(0, Phase::forward);
  EXPECT_EQ(order.next(), 1u);
  EXPECT_EQ(order.next_use(2), 1u);
  EXPECT_EQ(order.next_use(0), 4u);
  EXPECT_EQ(order.next(1), 2u);
  EXPECT_FALSE(order.next(2).has_value());  // in backward
  walk(order, {1, 2}, {});
  EXPECT_FALSE(order.next().has_value());  // the next use is in backward
  EXPECT_TRUE(order.touch(2, Phase::backward));
  EXPECT_EQ(order.next(), 1u);
  EXPECT_EQ(order.next_use(2), UseOrder::kNever);
  EXPECT_TRUE(order.follows_record());
}

TEST(UseOrder, PassesOverSkippedUnitsAndStopsPredictingAtNewOnes) {
  UseOrder order(4);
  walk(order, {0, 1, 2}, {2, 1, 0});
  order.end_step();
  walk(order, {0, 2}, {});  // 1 is skipped
  EXPECT_TRUE(order.follows_record());
  EXPECT_EQ(order.next_use(1), 1u);
  order.touch(3, Phase::forward);
  EXPECT_FALSE(order.follows_record());
  EXPECT_EQ(order.next_use(1), UseOrder::kNever);
  order.end_step();
  order.touch(0, Phase::forward);
  EXPECT_EQ(order.next(), 2u);
}

}  // namespace
