#include "train/train_fixture.h"

// parallel.share_parameters of the trainer, against whole copies.

namespace tessera::testing {
namespace {

class ZeroShareTraining : public TrainFixture {
 protected:
  void expect_equal_training(int world, const std::vector<std::string>& overrides) {
    const auto train = [&](const std::string& more) {
      auto all = overrides;
      all.push_back("parallel={type: ZeroRedundancyOptimizer" + more + "}");
      return train_ranks(world, all);
    };
    const auto whole = train(""), shared = train(", share_parameters: true");
    EXPECT_EQ(texts(shared.losses), texts(whole.losses));
    EXPECT_EQ(texts(shared.grad_norms), texts(whole.grad_norms));
    EXPECT_EQ(shared.eval_loss, whole.eval_loss);
  }
};

TEST_F(ZeroShareTraining, IsThatOfWholeCopies) {
  for (int world = 1; world <= 4; ++world) expect_equal_training(world, {});
}

TEST_F(ZeroShareTraining, AccumulatesClipsAveragesAndJoins) {
  expect_equal_training(2, {"train.accumulation=3", "train.clip_grad_norm=0.5"});
  expect_equal_training(2, {"train.ema={decay: 0.9}", "train.eval_every=2"});
  expect_equal_training(3, {"train.global_batch=7", "data.uneven=join"});
}

TEST_F(ZeroShareTraining, LoadsFrozenAndTrainedWeightsOnceAHost) {
  train_ranks(1, {"train.save=weights.safetensors"});
  for (const auto* type : {"ZeroRedundancyOptimizer", "DistributedDataParallel"}) {
    const auto train = [&](const std::string& more) {
      return train_ranks(
          2, {"model.init=weights.safetensors", "model.seed=7", "model.freeze=[\"**bias\"]",
              std::string("parallel={type: ") + type + more + "}"});
    };
    const auto whole = train(""), shared = train(", share_parameters: true");
    EXPECT_EQ(texts(shared.losses), texts(whole.losses)) << type;
    EXPECT_EQ(shared.eval_loss, whole.eval_loss) << type;
  }
}

}  // namespace
}  // namespace tessera::testing
