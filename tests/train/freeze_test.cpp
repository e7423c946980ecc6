#include <gmock/gmock.h>

#include "harness/thrown_by.h"
#include "tessera/checkpoint_store.h"
#include "tessera/train/registries.h"
#include "tessera/weights/weights.h"
#include "train/train_fixture.h"

// Layers that a hook freezes or unfreezes during a run.

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::expect_near;
using ::testing::HasSubstr;

/// Freezes the first block after step `from`, and unfreezes it after step `to`.
struct FreezesForATime : RunHook {
  FreezesForATime(int64_t begin, int64_t end) : from(begin), to(end) {}
  void before_run(RunState& state) override { after_step(state); }
  void after_step(RunState& state) override {
    for (const auto& item : state.model->model().module->named_parameters()) {
      if (item.key().rfind("transformer.h.0.", 0) == 0)
        at::Tensor(item.value()).set_requires_grad(state.step < from || state.step >= to);
    }
  }
  int64_t from, to;
};

class FreezeTest : public testing::TrainFixture {
 protected:
  static void SetUpTestSuite() {
    registry::hooks().add("FreezesForATime", [](OptionReader& options) {
      int64_t from = 0, to = 0;
      options.read("from", from, "");
      options.read("to", to, "");
      options.finish();
      return
          [=]() -> std::shared_ptr<RunHook> { return std::make_shared<FreezesForATime>(from, to); };
    });
  }

  /// The same weights, optimizer state and averages, of the same parameters.
  static void expect_equal(const std::string& a, const std::string& b, const std::string& where) {
    const Checkpoint left(a), right(b);
    const Weights left_weights(a), right_weights(b);
    std::vector<ElementRange> requests;
    for (const auto& entry : left_weights.entries()) {
      const auto weight = left_weights.load(entry.name);
      EXPECT_TRUE(at::equal(weight, right_weights.load(entry.name))) << where << entry.name;
      requests.push_back(
          {entry.name, weight.sizes().vec(), 0, weight.numel(), memory_strides(weight)});
    }
    const auto mine = left.load_slices(requests), theirs = right.load_slices(requests);
    for (size_t i = 0; i < mine.size(); ++i) {
      EXPECT_EQ(mine[i].state.tensors.count("weight_average"), 1u) << where << mine[i].parameter;
      EXPECT_EQ(mine[i].state.tensors.count("exp_avg"), 1u) << where << mine[i].parameter;
      for (const auto& [key, tensor] : mine[i].state.tensors) {
        EXPECT_TRUE(at::equal(tensor, theirs[i].state.tensors.at(key)))
            << where << mine[i].parameter << " " << key;
      }
    }
  }
};

TEST_F(FreezeTest, ARunResumesFromACheckpointThatWasWrittenWhileALayerIsFrozen) {
  const std::vector<std::string> all{"train.steps=12", "train.ema.decay=0.9", "train.eval_every=4",
                                     "hooks=[{type: FreezesForATime, from: 3, to: 8}]"};
  const auto with = [&](std::initializer_list<std::string> more) {
    auto options = all;
    options.insert(options.end(), more);
    return options;
  };
  const auto reference = train_ranks(1, with({"parallel.type=none"}));
  for (const std::string wrapper :
       {"parallel.type=none",
        "parallel={type: DistributedDataParallel, find_unused_parameters: true}",
        "parallel.type=ZeroRedundancyOptimizer",
        "parallel={type: ZeroRedundancyOptimizer, partition: whole}",
        "parallel={type: ZeroRedundancyOptimizer, shard_gradients: true, share_parameters: true}",
        "parallel={type: DistributedOptimizer, reduce_method: mean}"}) {
    const int world = wrapper == "parallel.type=none" ? 1 : 2;
    fs::remove_all("whole");
    fs::remove_all("parts");
    const auto whole = train_ranks(world, with({wrapper, "checkpoint={folder: whole, every: 5}"}));
    expect_near(whole.losses, reference.losses, 1e-5);
    EXPECT_NEAR(*whole.eval_loss, *reference.eval_loss, 1e-5 * *reference.eval_loss) << wrapper;
    fs::create_directory("parts");
    fs::rename("whole/step-00000005", "parts/step-00000005");
    const auto rest = train_ranks(world, with({wrapper, "checkpoint.folder=parts"}));
    ASSERT_EQ(rest.first_step, 5) << wrapper;
    EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + 5, whole.losses.end()))
        << wrapper;
    EXPECT_EQ(rest.eval_loss, whole.eval_loss) << wrapper;
    expect_equal("whole/step-00000012", "parts/step-00000012", wrapper + " ");
  }
}

TEST_F(FreezeTest, AFrozenLayerOfTheConfigThatAHookUnfreezesIsAnErrorThatNamesIt) {
  for (const std::string wrapper :
       {"parallel.type=none",
        "parallel={type: DistributedDataParallel, find_unused_parameters: true}",
        "parallel.type=ZeroRedundancyOptimizer",
        "parallel={type: DistributedOptimizer, reduce_method: mean}",
        "parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}}"}) {
    const auto text = testing::thrown_by([&] {
      train_ranks(wrapper == "parallel.type=none" ? 1 : 2,
                  {wrapper, "model.freeze='transformer.h.0.**'",
                   "hooks=[{type: FreezesForATime, from: 0, to: 2}]"});
    });
    EXPECT_THAT(text, HasSubstr("parameter transformer.h.0.")) << wrapper;
    EXPECT_THAT(text, HasSubstr("was frozen when training was set up (model.freeze")) << wrapper;
  }
}

}  // namespace
}  // namespace tessera
