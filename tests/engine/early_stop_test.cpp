#include "tessera/step/early_stop.h"

#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/thrown_by.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::thrown_by;
using Mode = EarlyStopOptions::Mode;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

/// The number of values after which training stops; -1 if it does not stop.
int stops_after(EarlyStopOptions options, const std::vector<double>& values) {
  EarlyStop stop(options);
  for (size_t i = 0; i < values.size(); ++i)
    if (stop.observe(values[i])) return static_cast<int>(i) + 1;
  return -1;
}

TEST(EarlyStop, StopsAfterPatienceObservationsWithoutImprovement) {
  EXPECT_EQ(stops_after({.patience = 2}, {3, 2, 2, 2}), 4);
  EXPECT_EQ(stops_after({.patience = 2}, {3, 4, 2.5, 2.6, 2.4, 2.4}), -1);
  EXPECT_EQ(stops_after({.patience = 1}, {3, 2, 2.1}), 3);
}

TEST(EarlyStop, ModeGreaterTakesGreaterValuesAsBetter) {
  EXPECT_EQ(stops_after({.patience = 2, .mode = Mode::greater}, {1, 2, 3, 4, 5}), -1);
  EXPECT_EQ(stops_after({.patience = 2, .mode = Mode::less}, {1, 2, 3, 4, 5}), 3);
}

TEST(EarlyStop, AnImprovementExceedsMinDelta) {
  EXPECT_EQ(stops_after({.patience = 2, .min_delta = 0.5}, {4, 3.75, 3.5}), 3);
  EXPECT_EQ(stops_after({.patience = 2, .min_delta = 0.5}, {4, 3.75, 3.25, 3, 2.5}), -1);
  EXPECT_EQ(stops_after({.patience = 2, .min_delta = 0.5, .mode = Mode::greater}, {1, 1.25, 1.5}),
            3);
}

TEST(EarlyStop, ANonFiniteValueStopsOrIsNoImprovement) {
  for (const double value : {kNaN, kInf, -kInf}) {
    EXPECT_EQ(stops_after({.patience = 3}, {1, value}), 2);
    EXPECT_EQ(stops_after({.patience = 3, .check_finite = false}, {1, value, value, value}), 4);
    EXPECT_EQ(stops_after({.patience = 3, .check_finite = false}, {value, value, 1, 2, 3, 4}), 6);
  }
}

TEST(EarlyStop, StaysStopped) {
  EarlyStop stop({.patience = 1});
  EXPECT_FALSE(stop.observe(1));
  EXPECT_TRUE(stop.observe(2));
  EXPECT_TRUE(stop.observe(0.5));
  EXPECT_EQ(stop.state().best, 1);
}

TEST(EarlyStop, ALoadedStateContinues) {
  EarlyStop first({.patience = 3});
  for (const double value : {2.0, 3.0, 3.0}) first.observe(value);
  EarlyStop second({.patience = 3});
  second.load_state(first.state());
  EXPECT_EQ(second.state().best, 2);
  EXPECT_TRUE(second.observe(2.5));
  EarlyStop third({.patience = 3});
  third.load_state(second.state());
  EXPECT_TRUE(third.observe(0));
}

TEST(EarlyStop, OptionsOutOfRangeAreNamed) {
  EXPECT_EQ(thrown_by([] { EarlyStop({.patience = 0}); }),
            "EarlyStop: patience: 0; expected a whole number >= 1");
  EXPECT_THAT(thrown_by([] { EarlyStop({.min_delta = -1}); }), HasSubstr("min_delta: -1"));
  EXPECT_THAT(thrown_by([] { EarlyStop({.min_delta = kNaN}); }), HasSubstr("min_delta: nan"));
  EXPECT_THAT(thrown_by([] { EarlyStop().load_state({.waited = -2}); }),
              HasSubstr("state.waited: -2"));
}

}  // namespace
}  // namespace tessera
