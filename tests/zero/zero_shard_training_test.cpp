#include "train/train_fixture.h"

// parallel.shard_gradients of the trainer, against whole gradients.

namespace tessera::testing {
namespace {

class ZeroShardTraining : public TrainFixture {
 protected:
  void expect_equal_training(int world, const std::vector<std::string>& overrides, bool exact) {
    const auto train = [&](const std::string& more) {
      auto all = overrides;
      all.push_back("parallel={type: ZeroRedundancyOptimizer, bucket_cap_mb: 0.001" + more + "}");
      return train_ranks(world, all);
    };
    const auto whole = train(""), sharded = train(", shard_gradients: true");
    ASSERT_EQ(sharded.losses.size(), whole.losses.size());
    EXPECT_EQ(sharded.skipped_steps, whole.skipped_steps);
    for (size_t i = 0; i < whole.losses.size(); ++i) {
      EXPECT_NEAR(sharded.losses[i], whole.losses[i], exact ? 0 : 2e-5) << "step " << i;
      EXPECT_NEAR(sharded.grad_norms[i], whole.grad_norms[i], 1e-4) << "step " << i;
    }
  }
};

TEST_F(ZeroShardTraining, IsThatOfWholeGradients) {
  for (int world = 1; world <= 4; ++world) expect_equal_training(world, {}, true);
}

TEST_F(ZeroShardTraining, AccumulatesClipsScalesAndJoins) {
  expect_equal_training(2, {"train.accumulation=3"}, false);
  expect_equal_training(2, {"train.clip_grad_norm=0.5"}, false);
  expect_equal_training(2, {"train.accumulation=2", "train.clip_grad_value=0.01"}, false);
  expect_equal_training(2, {"train.loss_scale={init_scale: 64}"}, true);
  expect_equal_training(3, {"train.global_batch=7", "data.uneven=join"}, false);
  expect_equal_training(2, {"train.global_batch=8", "train.accumulation=2", "data.uneven=join"},
                        false);
}

}  // namespace
}  // namespace tessera::testing
