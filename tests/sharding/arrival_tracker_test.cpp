#include "sharding/gradients/arrival_tracker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::sharding {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(ArrivalTracker, AGroupIsCompleteWhenEachOfItsGradientsHasArrived) {
  ArrivalTracker tracker({0, 1, 0}, 2);
  EXPECT_FALSE(tracker.complete(0));
  EXPECT_EQ(tracker.arrive(2), 1);
  EXPECT_FALSE(tracker.complete(0));
  EXPECT_EQ(tracker.arrive(0), 1);
  EXPECT_TRUE(tracker.complete(0));
  EXPECT_FALSE(tracker.complete(1));
}

TEST(ArrivalTracker, AGroupWithoutGradientsIsComplete) {
  ArrivalTracker tracker({1}, 3);
  EXPECT_TRUE(tracker.complete(0));
  EXPECT_FALSE(tracker.complete(1));
  EXPECT_TRUE(tracker.complete(2));
}

TEST(ArrivalTracker, AGradientThatIsNotExpectedDoesNotKeepItsGroupOpen) {
  ArrivalTracker tracker({0, 0}, 1);
  tracker.expect(1, 0);
  tracker.arrive(0);
  EXPECT_TRUE(tracker.complete(0));
  EXPECT_EQ(tracker.arrive(1), 1);  // it is counted all the same
  EXPECT_TRUE(tracker.complete(0));
  EXPECT_THAT(tracker.order(), ElementsAre(0, 1));
}

TEST(ArrivalTracker, SeveralArrivalsCanBeExpected) {
  ArrivalTracker tracker({0, 0}, 1);
  tracker.expect(0, 2);
  tracker.arrive(1);
  tracker.arrive(0);
  EXPECT_FALSE(tracker.complete(0));
  EXPECT_EQ(tracker.arrive(0), 2);
  EXPECT_TRUE(tracker.complete(0));
}

TEST(ArrivalTracker, AnUnboundedExpectationIsNeverMet) {
  ArrivalTracker tracker({0}, 1);
  tracker.expect(0, ArrivalTracker::kUnbounded);
  for (int i = 1; i < 100; ++i) EXPECT_EQ(tracker.arrive(0), i);
  EXPECT_FALSE(tracker.complete(0));
}

TEST(ArrivalTracker, MoreArrivalsThanExpectedAreCountedAndChangeNothing) {
  ArrivalTracker tracker({0, 0}, 1);
  EXPECT_EQ(tracker.arrive(0), 1);
  EXPECT_EQ(tracker.arrive(0), 2);
  EXPECT_FALSE(tracker.complete(0));
  EXPECT_THAT(tracker.order(), ElementsAre(0));
}

TEST(ArrivalTracker, ANewBackwardKeepsExpectationsAndForgetsArrivals) {
  ArrivalTracker tracker({0, 0}, 1);
  tracker.expect(1, 0);
  tracker.arrive(0);
  tracker.begin();
  EXPECT_FALSE(tracker.complete(0));
  EXPECT_EQ(tracker.arrivals(0), 0);
  EXPECT_THAT(tracker.order(), IsEmpty());
  tracker.arrive(0);
  EXPECT_TRUE(tracker.complete(0));
}

TEST(ArrivalTracker, AnExpectationThatChangesWithinABackwardCountsWhatHasArrived) {
  ArrivalTracker tracker({0, 0}, 1);
  tracker.arrive(0);
  tracker.expect(1, 0);
  EXPECT_TRUE(tracker.complete(0));
  tracker.expect(0, 2);
  EXPECT_FALSE(tracker.complete(0));
  tracker.arrive(0);
  EXPECT_TRUE(tracker.complete(0));
  tracker.expect(1, 1);
  EXPECT_FALSE(tracker.complete(0));
}

}  // namespace
}  // namespace tessera::sharding
