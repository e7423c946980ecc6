#include "tessera/step/nonfinite.h"

#include <cmath>

#include <gmock/gmock.h>
#include <torch/nn/functional.h>

#include "harness/thrown_by.h"
#include "tessera/checkpoint_store.h"
#include "tessera/safetensors.h"
#include "tessera/train/registries.h"
#include "train/normed.h"
#include "train/train_fixture.h"

// Losses, gradients and parameters that are not finite, and losses that jump: the run names the
// origin, and stops, skips the step or goes back to a checkpoint.

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// 1200 samples. One of them, or all from one on, can be faulty.
struct FaultySamples : Dataset {
  struct Options {
    int64_t nan_at = -1, nan_from = -1, gradient_at = -1, spike_at = -1;
    void read(OptionReader& keys) {
      keys.read("nan_at", nan_at, "sample with a NaN");
      keys.read("nan_from", nan_from, "first sample with a NaN");
      keys.read("gradient_at", gradient_at, "sample with a gradient of NaN");
      keys.read("spike_at", spike_at, "sample with a large loss");
    }
  };
  explicit FaultySamples(const Options& chosen) : options(chosen) {}
  int64_t size() const override { return 1200; }
  std::string describe() const override { return "faulty samples"; }
  Batch get(const std::vector<int64_t>& samples) const override {
    const at::Tensor i = torch::tensor(samples, torch::kLong);
    const at::Tensor x = torch::stack({i.sin(), i.cos(), (i * 0.3).sin()}, 1);
    const at::Tensor nan =
        i.eq(options.nan_at)
            .logical_or(i.ge(options.nan_from).logical_and_(torch::tensor(options.nan_from >= 0)));
    x.select(1, 0).masked_fill_(nan, NAN);
    Batch batch{x, i.sin().gt(0).to(torch::kLong), {}};
    batch.extra["gradient"] = i.eq(options.gradient_at);
    batch.extra["spike"] = i.eq(options.spike_at);
    return batch;
  }
  Options options;
};

/// Cross entropy. A sample marked "gradient" adds zero with a gradient of NaN.
Losses faulty_loss(const at::Tensor& output, const Batch& batch) {
  at::Tensor loss = torch::nn::functional::cross_entropy(output, batch.targets);
  const at::Tensor rows = output.index({batch.extra.at("gradient")});
  if (rows.numel() > 0) loss = loss + (rows * 0).sqrt().sum();
  return {{"loss", loss + 1000 * batch.extra.at("spike").sum()}};
}

/// After step `at`, one element of two.weight is infinite, as after a bad update.
struct Poison : RunHook {
  int64_t at = 0;
  void after_step(RunState& state) override {
    if (state.step != at) return;
    const torch::NoGradGuard no_grad;
    for (const auto& shard : state.model->shards())
      if (shard.parameter == "two.weight" && shard.begin == 0 && shard.numel > 0)
        shard.tensor.view({-1})[0] = INFINITY;
    state.model->publish_shards();
  }
};

const std::vector<std::string> kTypes{
    "{type: DistributedDataParallel}",
    "{type: ZeroRedundancyOptimizer}",
    "{type: ZeroRedundancyOptimizer, partition: whole}",
    "{type: ZeroRedundancyOptimizer, parameters_as_bucket_view: true}",
    "{type: DistributedOptimizer, reduce_method: mean}",
    "{type: FullyShardedDataParallel, wrap_policy: {type: leaves}}"};

class Nonfinite : public testing::TrainFixture {
 protected:
  void SetUp() override {
    TrainFixture::SetUp();
    static const bool once = [] {
      registry::models().add<testing::Normed>("WithNorm");
      registry::datasets().add<FaultySamples>("FaultySamples");
      registry::losses().add("faulty", faulty_loss);
      registry::hooks().add("Poison", [](OptionReader& options) {
        int64_t at = 0;
        options.read("at", at, "steps done");
        options.finish();
        return [at]() -> std::shared_ptr<RunHook> {
          auto hook = std::make_shared<Poison>();
          hook->at = at;
          return hook;
        };
      });
      return true;
    }();
    ASSERT_TRUE(once);
    std::ofstream("c.yaml") << "model: {type: WithNorm, seed: 1}\n"
                               "data: {type: FaultySamples, order: sequential}\n"
                               "loss: {type: faulty}\n"
                               "optimizer: {type: AdamW, lr: 0.05}\n"
                               "train: {steps: 6, global_batch: 12, save: out/model.safetensors,\n"
                               "        log: out/log.jsonl}\n";
  }

  std::string failure_of(int world, const std::vector<std::string>& overrides) {
    try {
      train_ranks(world, overrides);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  /// Bytes of the weights that a run saves. Each run gets a folder of its own.
  std::string weights_of(int world, std::vector<std::string> overrides) {
    const std::string folder = "run-" + std::to_string(++runs_);
    overrides.push_back("checkpoint={folder: " + folder + ", every: 2}");
    result_ = train_ranks(world, overrides);
    return bytes_of("out/model.safetensors");
  }

  TrainResult result_;
  int runs_ = 0;
};

TEST_F(Nonfinite, ALossIsNamedWithItsRankAndBatch) {
  for (const auto& parallel : kTypes) {
    for (const int world : {2, 3, 4}) {
      const int rank = 7 / (12 / world);
      const std::string text =
          failure_of(world, {"parallel=" + parallel, "data.nan_at=43",
                             world == 2 ? "train.accumulation=3" : "train.accumulation=1"});
      EXPECT_THAT(text, HasSubstr("train.on_nonfinite: stop: step 3: rank " + std::to_string(rank) +
                                  ", forward: the loss is nan; its batch has NaN in 1 of "))
          << parallel;
      EXPECT_FALSE(std::filesystem::exists("out/model.safetensors"));
      EXPECT_TRUE(log().back().at("loss").is_null());
      EXPECT_EQ(log().size(), 4U);
    }
  }
  EXPECT_THAT(failure_of(1, {"data.nan_at=43"}),
              HasSubstr("step 3: rank 0, forward: the loss is nan; its batch has NaN in 1 of 36 "
                        "elements of inputs; nothing of this step is saved"));
  EXPECT_THAT(failure_of(2, {"data.nan_from=12"}), HasSubstr("step 1: ranks 0, 1, forward"));
}

TEST_F(Nonfinite, AGradientIsNamedWithItsRankAndFirstParameter) {
  for (const auto& parallel : kTypes) {
    for (const int world : {2, 3, 4}) {
      for (const char* clip : {"train.clip_grad_norm=null", "train.clip_grad_norm=1"}) {
        const int rank = 7 / (12 / world);
        EXPECT_THAT(failure_of(world, {"parallel=" + parallel, "data.gradient_at=43", clip}),
                    HasSubstr("step 3: rank " + std::to_string(rank) +
                              ", backward: the norm of the gradient is nan; the first parameter "
                              "whose gradient is not finite is one.weight"))
            << parallel << " world " << world << " " << clip;
      }
    }
  }
  EXPECT_THAT(failure_of(1, {"data.gradient_at=43"}), HasSubstr("step 3: rank 0, backward: "));
}

TEST_F(Nonfinite, AParameterIsNamedWithTheUpdateThatMadeIt) {
  for (const auto& parallel : kTypes) {
    EXPECT_THAT(failure_of(2, {"parallel=" + parallel, "hooks=[{type: Poison, at: 2}]"}),
                HasSubstr(", update of step 1: parameter two.weight: infinity in 1 of "))
        << parallel;
    EXPECT_THAT(failure_of(2, {"parallel=" + parallel, "hooks=[{type: Poison, at: 6}]"}),
                HasSubstr(", update of step 5: parameter two.weight: infinity in 1 of "))
        << parallel;
    EXPECT_FALSE(std::filesystem::exists("out/model.safetensors"));
  }
}

TEST_F(Nonfinite, WeightsThatARunBeganWithAreNotSavedEither) {
  train_ranks(1, {"train.steps=0"});
  const SafetensorsFile begin("out/model.safetensors");
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& name : begin.names()) {
    tensors.emplace_back(name, begin.load(name));
    if (name == "one.bias") tensors.back().second[2] = NAN;
  }
  save_safetensors("bad.safetensors", tensors);
  std::filesystem::remove("out/model.safetensors");
  EXPECT_THAT(failure_of(2, {"train.steps=0", "model.init=bad.safetensors"}),
              HasSubstr("train.save: out/model.safetensors is not written: after 0 steps "
                        "parameter one.bias has NaN in 1 of 5 elements"));
  EXPECT_THAT(failure_of(2, {"model.init=bad.safetensors"}),
              HasSubstr("initial weights: parameter one.bias: NaN in 1 of"));
  EXPECT_FALSE(std::filesystem::exists("out/model.safetensors"));
}

TEST_F(Nonfinite, SkipAndRollbackLeaveOneStepOutAndGiveEqualBits) {
  for (const auto& parallel : kTypes) {
    for (const int world : {2, 3, 4}) {
      for (const char* fault : {"data.nan_at=43", "data.gradient_at=43"}) {
        const std::string chosen = "parallel=" + parallel;
        const auto skipped = weights_of(world, {chosen, fault, "train.on_nonfinite=skip"});
        EXPECT_EQ(result_.skipped_steps, 1) << parallel;
        EXPECT_EQ(result_.rollbacks, 0);
        EXPECT_EQ(result_.losses.size(), 6U);
        const auto losses = result_.losses;
        const auto back = weights_of(world, {chosen, fault, "train.on_nonfinite=rollback"});
        EXPECT_EQ(result_.rollbacks, 1) << parallel;
        EXPECT_TRUE(skipped == back) << parallel << " world " << world << " " << fault;
        ASSERT_EQ(result_.losses.size(), 6U);
        EXPECT_TRUE(std::isnan(result_.losses[3]));
        EXPECT_EQ(result_.losses[4], losses[4]);
        EXPECT_EQ(result_.losses[5], losses[5]);
        EXPECT_TRUE(skipped != weights_of(world, {chosen}));
        const SafetensorsFile saved("out/model.safetensors");
        for (const auto& name : saved.names())
          EXPECT_EQ(nonfinite_text(saved.load(name)), "") << parallel << " " << name;
      }
    }
  }
}

/// What rounding between hosts took from the gradients of a skipped step is not used, and a loss
/// scale that is a power of two does not change what it takes. A rollback to the beginning leaves
/// the step out of the whole run.
TEST_F(Nonfinite, RoundedGradientsForgetASkippedStepAndFollowTheLossScale) {
  auto types = kTypes;
  types.push_back("{type: ZeroRedundancyOptimizer, shard_gradients: true}");
  for (const auto& type : types) {
    const auto weights = [&](std::vector<std::string> overrides) {
      overrides.push_back("parallel=" + type);
      overrides.push_back("parallel.wire.gradients=int8");
      overrides.push_back("train.accumulation=2");
      overrides.push_back("checkpoint={folder: run-" + std::to_string(++runs_) + ", every: 100}");
      result_ = train_ranks(2, overrides, {0, 1});
      return bytes_of("out/model.safetensors");
    };
    for (const char* fault : {"data.nan_at=43", "data.gradient_at=43"}) {
      const auto skipped = weights({fault, "train.on_nonfinite=skip"});
      EXPECT_EQ(result_.skipped_steps, 1) << type;
      EXPECT_TRUE(skipped == weights({fault, "train.on_nonfinite=rollback"})) << type << fault;
      EXPECT_EQ(result_.rollbacks, 1) << type;
    }
    const std::string skip = "train.on_nonfinite=skip", gradient = "data.gradient_at=43";
    const auto fixed = weights({skip, gradient, "train.loss_scale=1024"});
    EXPECT_EQ(result_.skipped_steps, 1) << type;
    EXPECT_TRUE(fixed == weights({skip, gradient,
                                  "train.loss_scale={init_scale: 1024, growth_interval: 1}"}))
        << type;
    EXPECT_EQ(result_.skipped_steps, 1) << type;
    EXPECT_TRUE(fixed != weights({skip})) << type;
  }
}

TEST_F(Nonfinite, ARollbackWithoutACheckpointBeginsAgain) {
  const auto skipped = weights_of(2, {"data.nan_at=1", "train.on_nonfinite=skip"});
  EXPECT_TRUE(skipped == weights_of(2, {"data.nan_at=1", "train.on_nonfinite=rollback"}));
  EXPECT_EQ(result_.rollbacks, 1);
  std::ifstream file("run-2/step-00000006/state.json");
  EXPECT_EQ(nlohmann::json::parse(file).at("left_out"), nlohmann::json({0}));
  EXPECT_EQ(log().size(), 6U);
}

TEST_F(Nonfinite, ASpikeIsRolledBack) {
  const std::string steps = "train.steps=26";
  const auto skipped = weights_of(2, {steps, "data.nan_at=295", "train.on_nonfinite=skip"});
  EXPECT_TRUE(skipped == weights_of(2, {steps, "data.spike_at=295", "train.rollback_on_spike=5"}));
  EXPECT_EQ(result_.rollbacks, 1);
  EXPECT_THAT(out_, HasSubstr("more than 5 times the median"));
  weights_of(2, {steps, "data.spike_at=295"});
  EXPECT_EQ(result_.rollbacks, 0);
}

TEST_F(Nonfinite, SkipsAndRollbacksAreBounded) {
  EXPECT_THAT(
      failure_of(2, {"data.nan_from=24", "train.on_nonfinite=skip", "train.nonfinite_limit=2"}),
      HasSubstr("step 4: ranks 0, 1, forward: the loss is nan"));
  EXPECT_THAT(failure_of(2, {"data.nan_from=24", "train.on_nonfinite=rollback",
                             "train.nonfinite_limit=2", "checkpoint={folder: f, every: 2}"}),
              HasSubstr("train.nonfinite_limit: 2, and steps 2 to 4 are 3 in a row"));
  EXPECT_EQ(latest_checkpoint("f"), "f/step-00000004");
  EXPECT_THAT(failure_of(2, {"train.on_nonfinite=rollback", "hooks=[{type: Poison, at: 4}]",
                             "checkpoint={folder: g, every: 2}"}),
              HasSubstr("not finite after step 3 again, although that step was left out"));
}

TEST_F(Nonfinite, AParameterThatIsNotFiniteIsNotSkipped) {
  for (const auto& parallel : kTypes) {
    std::filesystem::remove_all("f");
    const std::string text =
        failure_of(2, {"parallel=" + parallel, "train.on_nonfinite=skip",
                       "hooks=[{type: Poison, at: 4}]", "checkpoint={folder: f, every: 3}"});
    EXPECT_THAT(text, HasSubstr(", update of step 3: parameter ")) << parallel;
    EXPECT_THAT(text, HasSubstr("so \"skip\" does not help")) << parallel;
    EXPECT_EQ(latest_checkpoint("f"), "f/step-00000003") << parallel;
  }
}

TEST_F(Nonfinite, AnUnsoundCheckpointIsMarkedAndDoesNotRemoveASoundOne) {
  const std::string folder = "checkpoint={folder: f, every: 1, keep_last: 1}";
  for (const auto& parallel : kTypes) {
    std::filesystem::remove_all("f");
    const std::string text =
        failure_of(2, {"parallel=" + parallel, "hooks=[{type: Poison, at: 4}]", folder});
    EXPECT_THAT(text, HasSubstr("update of step 3: f/step-00000004 is marked as unsound: "
                                "model-0000"))
        << parallel;
    EXPECT_THAT(text, HasSubstr("the last sound checkpoint is f/step-00000003"));
    EXPECT_EQ(latest_sound_checkpoint("f"), "f/step-00000003");
    EXPECT_THAT(bytes_of("f/step-00000004/unsound.txt"),
                ::testing::MatchesRegex("model-0000.-of-00002.safetensors: two.weight: infinity in "
                                        "1 of 10 elements\n"));
    train_ranks(2, {"parallel=" + parallel, folder});
    EXPECT_THAT(out_, HasSubstr("resuming from f/step-00000003")) << parallel;
    EXPECT_EQ(latest_checkpoint("f"), "f/step-00000006");
    EXPECT_FALSE(std::filesystem::exists("f/step-00000004"));
  }
}

TEST_F(Nonfinite, OptionsThatContradictEachOtherAreRefused) {
  const auto refused = [](std::vector<std::string> overrides) {
    return testing::thrown_by([&] { load_config("c.yaml", overrides); });
  };
  EXPECT_THAT(refused({"train.on_nonfinite=ignore"}),
              HasSubstr("expected one of stop, skip, rollback"));
  EXPECT_THAT(refused({"train.on_nonfinite=rollback"}),
              HasSubstr("train.on_nonfinite: rollback, but there is no checkpoint to go back to; "
                        "expected checkpoint.folder"));
  EXPECT_THAT(refused({"train.rollback_on_spike=3"}), HasSubstr("expected checkpoint.folder"));
  EXPECT_THAT(refused({"train.rollback_on_spike=1"}), HasSubstr("train.rollback_on_spike: 1"));
  EXPECT_THAT(refused({"train.on_nonfinite=skip", "train.error_if_nonfinite=true"}),
              HasSubstr("expected one of the two"));
  EXPECT_THAT(failure_of(2, {"train.on_nonfinite=skip",
                             "parallel={type: DistributedDataParallel, comm_hook: power_sgd}"}),
              HasSubstr("of parallel.comm_hook would keep what a step left in it"));
}

}  // namespace
}  // namespace tessera
