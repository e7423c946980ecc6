#include "train/run/sample_assignment.h"

#include <gtest/gtest.h>

namespace tessera::train {
namespace {

/// How many ranks get each sample of the run.
std::vector<int> owners(const SampleAssignment& assignment) {
  std::vector<int> counts(static_cast<size_t>(assignment.total), 0);
  for (int64_t i = assignment.start_iteration; i < assignment.all_iterations(); ++i) {
    for (int rank = 0; rank < assignment.world; ++rank) {
      const auto part = assignment.samples(i, rank);
      for (int64_t s = 0; s < part.count; ++s) ++counts[static_cast<size_t>(part.first + s)];
    }
  }
  return counts;
}

TEST(SampleAssignment, AssignsEverySampleToOneRank) {
  for (int world = 1; world <= 5; ++world) {
    for (const int64_t batch : {1, 4, 9}) {
      const SampleAssignment assignment(7, batch, world);
      EXPECT_EQ(owners(assignment), std::vector<int>(static_cast<size_t>(7 * batch), 1))
          << "world " << world << ", batch " << batch;
    }
  }
}

TEST(SampleAssignment, AWorldThatDividesTheBatchHasOneIterationPerStep) {
  const SampleAssignment assignment(7, 6, 3);
  EXPECT_EQ(assignment.full_iterations(), 7);
  EXPECT_EQ(assignment.all_iterations(), 7);
  EXPECT_EQ(assignment.samples(2, 1).first, 14);
  EXPECT_EQ(assignment.samples(2, 1).count, 2);
}

TEST(SampleAssignment, TheLastIterationMayHaveRanksWithoutData) {
  const SampleAssignment assignment(1, 5, 4);  // 2 samples per rank, 8 per iteration
  EXPECT_EQ(assignment.full_iterations(), 0);
  EXPECT_EQ(assignment.all_iterations(), 1);
  EXPECT_EQ(assignment.samples(0, 2).count, 1);
  EXPECT_EQ(assignment.samples(0, 3).count, 0);
}

TEST(SampleAssignment, TheLastIterationUsesWhatIsLeft) {
  SampleAssignment assignment(3, 10, 4);  // 30 samples, 12 per iteration
  EXPECT_EQ(assignment.used_before(2), 24);
  EXPECT_EQ(assignment.used_before(3), 30);
  assignment.start_iteration = 5;  // of a longer run
  assignment.start_sample = 50;
  EXPECT_EQ(assignment.used_before(5), 50);
}

TEST(SampleAssignment, AResumedRunAssignsTheRemainingSamples) {
  SampleAssignment assignment(12, 9, 2);  // 108 samples, 10 per iteration
  assignment.start_iteration = 7;
  assignment.start_sample = 63;
  EXPECT_EQ(assignment.all_iterations(), 12);
  EXPECT_EQ(assignment.full_iterations(), 11);
  EXPECT_EQ(assignment.samples(7, 1).first, 68);
  const auto counts = owners(assignment);
  for (size_t s = 0; s < counts.size(); ++s) EXPECT_EQ(counts[s], s < 63 ? 0 : 1) << s;
}

}  // namespace
}  // namespace tessera::train
