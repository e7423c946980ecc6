#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "train/run/run_records.h"

namespace tessera::train {
namespace {

TEST(FreeSpace, LessThanIsNeededIsAWarningWithBothSizes) {
  const int64_t more_than_any_disk = int64_t{1} << 62;
  EXPECT_THAT(space_warning("/tmp", more_than_any_disk, "the weights take"),
              ::testing::MatchesRegex("warning: /tmp: [0-9.]+ MB are free, and the weights take "
                                      "4611686018427[.]4 MB"));
  EXPECT_THAT(space_warning("", more_than_any_disk, "x"), ::testing::HasSubstr("warning: .: "));
  EXPECT_EQ(space_warning("/tmp", 1, "the weights take"), "");
  EXPECT_EQ(space_warning("/no/such/folder", more_than_any_disk, "x"), "") << "unknown";
}

}  // namespace
}  // namespace tessera::train
