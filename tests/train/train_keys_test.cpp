#include <cmath>

#include <gmock/gmock.h>

#include "harness/thrown_by.h"
#include "tessera/checkpoint_store.h"
#include "tessera/error.h"
#include "tessera/safetensors.h"
#include "tessera/train/registries.h"
#include "tessera/weights/weights.h"
#include "train/train_fixture.h"

// Keys of the config that change one thing of a run: clipping, freezing (also by a hook),
// activation checkpointing, the short last round of a join.

namespace tessera {
namespace {

using testing::expect_near;
using ::testing::HasSubstr;
using testing::kWrappers;
using testing::thrown_by;
using TrainKeys = testing::TrainFixture;
namespace fs = std::filesystem;

TEST_F(TrainKeys, ClipNormTypeIsTheNormThatIsReportedAndClipped) {
  const std::vector<std::string> clip{"optimizer={type: SGD, lr: 0.5}", "train.steps=3",
                                      "train.clip_grad_norm=1e-2"};
  std::map<std::string, std::vector<double>> losses;
  for (const char* type : {"1", "2", "inf"}) {
    auto one = clip;
    one.push_back(std::string("train.clip_norm_type=") + type);
    const auto alone = train_ranks(1, one);
    losses[type] = alone.losses;
    for (const auto& wrapper : kWrappers) {
      auto options = one;
      options.push_back(wrapper);
      const auto ours = train_ranks(2, options);
      expect_near(ours.losses, alone.losses, 1e-5);
      expect_near(ours.grad_norms, alone.grad_norms, 1e-4);
    }
  }
  EXPECT_GT(losses["1"][2], losses["2"][2]) << "a 1-norm of 0.01 allows a smaller step";
  EXPECT_GT(losses["2"][2], losses["inf"][2]);
}

TEST_F(TrainKeys, ErrorIfNonfiniteEndsTheRunBeforeTheUpdate) {
  for (const auto& wrapper : kWrappers) {
    for (const char* clip : {"train.clip_grad_norm=null", "train.clip_grad_norm=1"}) {
      std::string message;
      try {
        train_ranks(
            2, {wrapper, clip, "optimizer={type: SGD, lr: 1e30}", "train.error_if_nonfinite=true"});
      } catch (const Error& error) {
        message = error.what();
      }
      EXPECT_THAT(message, HasSubstr("because error_if_nonfinite is set")) << wrapper << clip;
    }
  }
  EXPECT_THAT(thrown_by([] { load_config("c.yaml", {"train.clip_norm_type=-1"}); }),
              HasSubstr("train.clip_norm_type: -1; expected a number > 0, or inf"));
}

TEST_F(TrainKeys, FrozenParametersKeepTheirValuesAndTheOthersTrain) {
  train_ranks(1, {"train.steps=0"});
  std::filesystem::copy("out/model.safetensors", "initial.safetensors");
  const SafetensorsFile initial("initial.safetensors");
  const std::string freeze = "model.freeze=['transformer.w?e.weight', 'transformer.h.0.**']";
  train_ranks(1, {freeze});
  const auto alone = testing::TrainFixture::bytes_of("out/model.safetensors");
  for (const auto& wrapper : kWrappers) {
    train_ranks(2, {freeze, wrapper});
    const SafetensorsFile trained("out/model.safetensors");
    for (const auto& name : trained.names()) {
      const bool frozen = name == "transformer.wte.weight" || name == "transformer.wpe.weight" ||
                          name.rfind("transformer.h.0.", 0) == 0;
      EXPECT_EQ(at::equal(trained.load(name), initial.load(name)), frozen) << wrapper << name;
    }
  }
  EXPECT_THAT(thrown_by([&] { train_ranks(1, {"model.freeze='transformer.x.*'"}); }),
              HasSubstr("model.freeze: \"transformer.x.*\" matches no parameter; expected names "
                        "such as transformer.wte.weight"));
  const std::string ignores =
      "parallel={type: FullyShardedDataParallel, ignored_modules: transformer.wpe}";
  EXPECT_THAT(thrown_by([&] { train_ranks(2, {ignores}); }),
              HasSubstr("ignored_states contains transformer.wpe.weight, which "
                        "would not be trained; expected model.freeze to contain it too"));
  train_ranks(2, {ignores, "model.freeze=transformer.wpe.*"});
  EXPECT_THAT(thrown_by([&] { train_ranks(1, {"model.freeze={patterns: []}"}); }),
              HasSubstr("model.freeze.patterns: []; expected names of parameters"));
  EXPECT_THAT(thrown_by([&] { train_ranks(2, {"model.freeze='**'"}); }),
              HasSubstr("model.freeze: all parameters are frozen"));
}

TEST_F(TrainKeys, ActivationCheckpointingChangesNoBit) {
  const auto plain = train_ranks(1, {"model.dropout=0.1"});
  const auto bytes = bytes_of("out/model.safetensors");
  const auto less = train_ranks(1, {"model.dropout=0.1", "model.activation_checkpointing=true"});
  EXPECT_EQ(less.losses, plain.losses);
  EXPECT_EQ(bytes_of("out/model.safetensors"), bytes);
  const auto every_second =
      train_ranks(1, {"model.dropout=0.1", "model.activation_checkpointing=true",
                      "model.activation_checkpointing_every=2"});
  EXPECT_EQ(every_second.losses, plain.losses);
  EXPECT_EQ(bytes_of("out/model.safetensors"), bytes);
  for (const std::string blocks : {"transformer.h.*", "[transformer.h.0]"}) {
    const auto some =
        train_ranks(1, {"model.dropout=0.1", "model.activation_checkpointing=" + blocks});
    EXPECT_EQ(some.losses, plain.losses) << blocks;
  }
  const auto refusal = [&](const std::string& value) {
    return thrown_by([&] { train_ranks(1, {"model.activation_checkpointing=" + value}); });
  };
  EXPECT_THAT(refusal("transformer.*"), HasSubstr("\"transformer.*\" matches no block"));
  for (const std::string value : {"1", "[]", "[true]", "{a: 1}"}) {
    EXPECT_THAT(refusal(value), HasSubstr("model.activation_checkpointing: ")) << value;
    EXPECT_THAT(refusal(value), HasSubstr("expected true, false, or patterns")) << value;
  }
  for (const auto& wrapper : kWrappers) {
    const auto whole = train_ranks(2, {wrapper});
    const auto again = train_ranks(2, {wrapper, "model.activation_checkpointing=true"});
    EXPECT_EQ(again.losses, whole.losses) << wrapper;
  }
}

TEST_F(TrainKeys, AShortLastRoundOfAJoinIsAMeanOverItsSamples) {
  // 35 sequences on 3 ranks: rounds of 9, 9, 9 and 8, in which rank 2 has 2 sequences and the
  // others 3.
  const std::string sgd = "optimizer={type: SGD, lr: 0.5}";
  train_ranks(1, {sgd, "train.global_batch=9", "train.steps=3"});
  std::filesystem::copy("out/model.safetensors", "three.safetensors");
  std::ofstream("rest.txt") << bytes_of("text.txt").substr(27 * 16);
  const auto last = train_ranks(1, {sgd, "train.global_batch=8", "train.steps=1",
                                    "model.init=three.safetensors", "data.path=rest.txt"});
  std::filesystem::copy("out/model.safetensors", "expected.safetensors");
  const SafetensorsFile expected("expected.safetensors");
  for (const auto& wrapper : kWrappers) {
    const auto joined =
        train_ranks(3, {sgd, wrapper, "train.global_batch=7", "train.steps=5", "data.uneven=join"});
    ASSERT_EQ(joined.losses.size(), 4u) << wrapper;
    EXPECT_NEAR(joined.losses[3], last.losses[0], 1e-5) << wrapper;
    const SafetensorsFile ours("out/model.safetensors");
    for (const auto& name : expected.names())
      EXPECT_TRUE(at::allclose(ours.load(name), expected.load(name), 1e-4, 1e-6)) << name;
  }
}

/// Freezes the first block after step `from`, and unfreezes it after step `to`.
struct FreezesForATime : RunHook {
  FreezesForATime(int64_t begin, int64_t end) : from(begin), to(end) {}
  void before_run(RunState& state) override { after_step(state); }
  void after_step(RunState& state) override {
    for (const auto& item : state.model->model().module->named_parameters())
      if (item.key().rfind("transformer.h.0.", 0) == 0)
        at::Tensor(item.value()).set_requires_grad(state.step < from || state.step >= to);
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
        "parallel={type: DistributedOptimizer, reduce_method: mean}",
        "parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}}"}) {
    const int world = wrapper == "parallel.type=none" ? 1 : 2;
    fs::remove_all("whole");
    fs::remove_all("parts");
    const auto whole =
        train_ranks(world, with({wrapper, "checkpoint={folder: whole, every: 5, keep_last: 9}"}));
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

TEST_F(FreezeTest, TheConfigThawsALayerAtAStep) {
  const std::string until = "model.freeze=[{patterns: 'transformer.h.0.**', until: 4}]";
  const std::string by_hook = "hooks=[{type: FreezesForATime, from: 0, to: 4}]";
  const auto reference = train_ranks(1, {"parallel.type=none", by_hook});
  const auto trained = train_ranks(1, {"parallel.type=none"});
  EXPECT_NE(reference.losses, trained.losses);
  for (const std::string wrapper :
       {"parallel.type=none", "parallel.type=DistributedDataParallel",
        "parallel.type=ZeroRedundancyOptimizer",
        "parallel={type: ZeroRedundancyOptimizer, shard_gradients: true}",
        "parallel={type: DistributedOptimizer, reduce_method: mean}",
        "parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}}"}) {
    const int world = wrapper == "parallel.type=none" ? 1 : 2;
    const auto whole = train_ranks(world, {wrapper, until});
    expect_near(whole.losses, reference.losses, 1e-5);
    for (const int stop : {2, 5}) {  // before and after
      fs::remove_all("parts");
      const std::string steps = "train.steps=" + std::to_string(stop);
      train_ranks(world, {wrapper, until, "checkpoint.folder=parts", steps});
      const auto rest = train_ranks(world, {wrapper, until, "checkpoint.folder=parts"});
      ASSERT_EQ(rest.first_step, stop) << wrapper;
      EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + stop, whole.losses.end()))
          << wrapper;
    }
  }
}

TEST_F(FreezeTest, AWrongRuleIsAnError) {
  const auto refused = [&](const std::string& rule, const std::string& words) {
    EXPECT_THAT(testing::thrown_by([&] { train_ranks(1, {"model.freeze=" + rule}); }),
                HasSubstr(words));
  };
  refused("[{patterns: 'transformer.**', until: 0}]", "model.freeze.until: 0; expected");
  refused("[{until: 2}]", "model.freeze.patterns: missing");
  refused("[{patterns: nobody, until: 2}]", "model.freeze: \"nobody\" matches no parameter");
  refused("[{patterns: '**', until: 2}]", "all parameters are frozen");
  refused("[[a]]", "expected a pattern, a map with patterns and until, or a list of both");
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
    EXPECT_THAT(text, HasSubstr("was frozen")) << wrapper;
  }
}

}  // namespace
}  // namespace tessera
