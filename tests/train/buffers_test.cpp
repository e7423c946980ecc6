#include <cmath>

#include "tessera/safetensors.h"
#include "tessera/train/registries.h"
#include "train/normed.h"
#include "train/train_fixture.h"

// Models with buffers that training changes: what is reported is what is saved, and a resumed run
// goes on with the same bits.

namespace tessera {
namespace {

class BuffersInTraining : public testing::TrainFixture {
 protected:
  void SetUp() override {
    TrainFixture::SetUp();
    static const bool once = [] {
      registry::models().add<testing::Normed>("Normed");
      registry::datasets().add<testing::Drifting<64>>("Drifting");
      return true;
    }();
    ASSERT_TRUE(once);
    std::ofstream("c.yaml") << "model: {type: Normed, seed: 1}\n"
                               "data: {type: Drifting, seed: 2}\n"
                               "loss: {type: cross_entropy}\n"
                               "optimizer: {type: SGD, lr: 0.1, momentum: 0.9}\n"
                               "train: {steps: 6, global_batch: 12, save: out/model.safetensors}\n";
  }
};

const std::vector<std::string> kParallel{
    "{type: DistributedDataParallel}", "{type: ZeroRedundancyOptimizer}",
    "{type: ZeroRedundancyOptimizer, shard_gradients: true}",
    "{type: DistributedOptimizer, reduce_method: mean}",
    "{type: FullyShardedDataParallel, wrap_policy: {type: leaves}}"};

TEST_F(BuffersInTraining, TheReportedEvaluationIsThatOfTheSavedModel) {
  for (const auto& wrapper : kParallel) {
    for (const int world : {2, 3, 4}) {
      for (const char* buffers : {"broadcast", "mean"}) {
        auto options = wrapper;
        options.replace(options.size() - 1, 1, std::string(", buffers: ") + buffers + "}");
        const auto trained = train_ranks(world, {"parallel=" + options, "train.eval_every=2"});
        std::filesystem::copy_file("out/model.safetensors", "saved.safetensors",
                                   std::filesystem::copy_options::overwrite_existing);
        const auto again =
            train_ranks(1, {"train.steps=0", "model.init=saved.safetensors", "train.save=null"});
        ASSERT_TRUE(trained.eval_loss && again.eval_loss);
        EXPECT_EQ(*trained.eval_loss, *again.eval_loss) << options << " world " << world;
      }
    }
  }
}

TEST_F(BuffersInTraining, AResumedRunHasTheBitsOfTheWholeRun) {
  for (const auto& wrapper : kParallel) {
    const std::string parallel = "parallel=" + wrapper;
    const auto whole = train_ranks(2, {parallel});
    const auto bytes = bytes_of("out/model.safetensors");
    std::filesystem::remove_all("steps");
    train_ranks(2, {parallel, "train.steps=4", "checkpoint.folder=steps"});
    const auto rest = train_ranks(2, {parallel, "checkpoint.folder=steps"});
    EXPECT_EQ(rest.first_step, 4) << wrapper;
    ASSERT_EQ(rest.losses.size(), 2u) << wrapper;
    EXPECT_EQ(rest.losses[1], whole.losses[5]) << wrapper;
    EXPECT_EQ(rest.eval_loss, whole.eval_loss) << wrapper;
    EXPECT_EQ(bytes_of("out/model.safetensors"), bytes) << wrapper;
  }
}

TEST_F(BuffersInTraining, MeanBuffersAreTheSameUnderAllWrappers) {
  const auto statistics = [&](const std::string& parallel) {
    train_ranks(2, {"parallel=" + parallel, "train.steps=3"});
    return SafetensorsFile("out/model.safetensors").load("norm.running_mean");
  };
  for (const auto& wrapper : kParallel) {
    auto mean = wrapper;
    mean.replace(mean.size() - 1, 1, ", buffers: mean}");
    EXPECT_FALSE(at::equal(statistics(wrapper), statistics(mean))) << wrapper;
    EXPECT_TRUE(at::allclose(
        statistics(mean), statistics("{type: DistributedDataParallel, buffers: mean}"), 1e-5, 1e-6))
        << wrapper;
  }
}

}  // namespace
}  // namespace tessera
