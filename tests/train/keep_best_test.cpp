#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "harness/thrown_by.h"
#include "tessera/safetensors.h"
#include "tessera/train/registries.h"
#include "train_fixture.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Its gradient is -1 everywhere, so that with SGD of rate 1 each weight is the number of steps. A
/// buffer counts the forwards in training.
struct ClimberImpl : torch::nn::Module {
  ClimberImpl()
      : height(register_parameter("height", torch::zeros({5}))),
        forwards(register_buffer("forwards", torch::zeros({1}))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (is_training()) forwards.add_(1);
    return height.mean().expand({x.size(0)});
  }
  at::Tensor height, forwards;
};
TORCH_MODULE(Climber);

struct Nothing : Dataset {
  int64_t size() const override { return 24; }
  std::string describe() const override { return "nothing"; }
  Batch get(const std::vector<int64_t>& samples) const override {
    const auto count = static_cast<int64_t>(samples.size());
    return {torch::zeros({count, 1}), torch::zeros({count})};
  }
  std::shared_ptr<const Dataset> validation() const { return std::make_shared<Nothing>(); }
};
struct WithoutValidation : Nothing {
  std::shared_ptr<const Dataset> validation() const { return nullptr; }
};

class KeepBestTest : public testing::TrainFixture {
 protected:
  void SetUp() override {
    TrainFixture::SetUp();
    if (!registry::models().contains("Climber")) {
      registry::models().add<Climber>("Climber");
      registry::datasets().add<Nothing>("Nothing");
      registry::datasets().add<WithoutValidation>("WithoutValidation");
      registry::losses().add(
          "fall", [](const at::Tensor& output, const at::Tensor&) { return -output.mean() * 5; });
      // The highest value is that after 5 steps.
      registry::metrics().add_plan(
          "peak", {{"peak"},
                   [](const at::Tensor& prediction, const Batch&) {
                     return torch::stack({prediction.sum(), torch::ones_like(prediction).sum()});
                   },
                   [](const at::Tensor& total) {
                     const double height = (total[0] / total[1]).item<double>();
                     return std::vector<double>{-(height - 5) * (height - 5)};
                   }});
    }
    std::ofstream("c.yaml")
        << "model: {type: Climber}\ndata: {type: Nothing}\nloss: fall\nmetrics: [peak]\n"
           "optimizer: {type: SGD, lr: 1}\ntrain: {steps: 12, global_batch: 12, eval_every: 1,"
           " save: out/model.safetensors}\n";
  }

  static std::vector<int64_t> steps_kept(const std::string& folder) {
    std::vector<int64_t> steps;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      if (name.rfind("step-", 0) == 0) steps.push_back(std::stoll(name.substr(5)));
    }
    std::sort(steps.begin(), steps.end());
    return steps;
  }
  static nlohmann::json state_of(const std::string& folder, int64_t step) {
    return nlohmann::json::parse(bytes_of(fmt::format("{}/step-{:08d}/state.json", folder, step)));
  }
  static double saved_height() {
    const at::Tensor height = SafetensorsFile("out/model.safetensors").load("height");
    EXPECT_TRUE(height.eq(height[0]).all().item<bool>()) << height;
    return height[0].item<double>();
  }
  static double saved_forwards() {
    return SafetensorsFile("out/model.safetensors").load("forwards").item<double>();
  }
};

const std::string kBestTwo = "checkpoint.keep_best={metric: peak, mode: max, count: 2}";
const std::vector<std::string> kFolder{"checkpoint.folder=run", "checkpoint.keep_last=1", kBestTwo};

TEST_F(KeepBestTest, TheBestCheckpointsStayBesideTheNewest) {
  for (const auto& wrapper : testing::kWrappers) {
    std::filesystem::remove_all("run");
    auto overrides = kFolder;
    overrides.push_back(wrapper);
    train_ranks(2, overrides);
    // 4 and 6 are equally good; the earlier one stays.
    EXPECT_THAT(steps_kept("run"), ElementsAre(4, 5, 12)) << wrapper;
    const auto best = state_of("run", 12)["keep_best"];
    EXPECT_EQ(best["metric"], "peak");
    EXPECT_EQ(best["mode"], "max");
    EXPECT_EQ(best["checkpoints"],
              nlohmann::json::parse(R"([{"step":5,"value":0.0},{"step":4,"value":-1.0}])"));
    EXPECT_EQ(state_of("run", 5)["keep_best"]["checkpoints"][0]["value"], 0.0);
    EXPECT_EQ(saved_height(), 12) << "keep_best alone does not change what is saved";
    EXPECT_THAT(out_, HasSubstr("checkpoint written to run/step-00000005, best peak -0.0000"));
  }
}

TEST_F(KeepBestTest, TheBestAreKnownAfterAResumeWithOtherRanks) {
  auto first = kFolder, second = kFolder;
  for (const auto& override : {"train.steps=7", "checkpoint.every=2"}) first.push_back(override);
  train_ranks(3, first);
  EXPECT_THAT(steps_kept("run"), ElementsAre(4, 5, 7));
  second.push_back("parallel.type=FullyShardedDataParallel");
  train_ranks(2, second);
  EXPECT_THAT(steps_kept("run"), ElementsAre(4, 5, 12));
  EXPECT_EQ(state_of("run", 12)["keep_best"]["checkpoints"][0]["step"], 5);
  // Another ranking begins anew: the loss falls all the time.
  second.push_back("checkpoint.keep_best={count: 1}");
  second.push_back("train.steps=14");
  train_ranks(2, second);
  EXPECT_THAT(out_, HasSubstr("checkpoint.keep_best ranked by peak before"));
  EXPECT_THAT(steps_kept("run"), ElementsAre(14));
}

TEST_F(KeepBestTest, ASlashAtTheEndOfTheFolderLosesNothing) {
  train_ranks(1, {"checkpoint.folder=run/", "checkpoint.keep_last=1", kBestTwo, "train.steps=7"});
  train_ranks(1, {"checkpoint.folder=run/", "checkpoint.keep_last=1", kBestTwo});
  EXPECT_THAT(steps_kept("run"), ElementsAre(4, 5, 12));
}

TEST_F(KeepBestTest, TheBestCheckpointIsOneToGoOnFrom) {
  train_ranks(2, kFolder);
  train_ranks(2, {"checkpoint.from=run/step-00000005", "train.steps=6"});
  EXPECT_EQ(saved_height(), 6);
}

const std::string kStop = "train.early_stop={patience: 3, metric: peak, mode: max}";

TEST_F(KeepBestTest, AnEarlyStopSavesTheBestWeights) {
  for (const int world : {1, 2, 3, 4}) {
    for (const auto& wrapper : testing::kWrappers) {
      const auto result = train_ranks(world, {kStop, wrapper});
      EXPECT_EQ(result.losses.size(), 8u);
      EXPECT_EQ(saved_height(), 5) << world << " " << wrapper;
      EXPECT_EQ(saved_forwards(), 5) << world << " " << wrapper;
      EXPECT_THAT(out_, HasSubstr("the weights are those after 5 steps"));
    }
  }
}

TEST_F(KeepBestTest, ARunThatHasStoppedEarlyDoesNotTrainAgain) {
  for (const auto& wrapper : testing::kWrappers) {
    std::filesystem::remove_all("run");
    train_ranks(2, {kStop, "checkpoint.folder=run", wrapper});
    const auto again = train_ranks(3, {kStop, "checkpoint.folder=run", wrapper});
    EXPECT_EQ(again.losses.size(), 0u) << wrapper;
    EXPECT_THAT(out_, HasSubstr("early stop: the run has ended"));
    EXPECT_EQ(saved_height(), 5) << wrapper;
  }
  const auto longer = train_ranks(2, {"train.early_stop={patience: 4, metric: peak, mode: max}",
                                      "checkpoint.folder=run", testing::kWrappers[0]});
  EXPECT_EQ(longer.losses.size(), 1u);
  EXPECT_EQ(saved_height(), 5);
}

TEST_F(KeepBestTest, ARunToItsEndSavesTheBestWeightsToo) {
  train_ranks(2, {"train.early_stop={patience: 100, metric: peak, mode: max}"});
  EXPECT_EQ(saved_height(), 5);
}

TEST_F(KeepBestTest, AnotherRankingOfAnEarlyStopBeginsAnew) {
  train_ranks(2, {"train.early_stop={patience: 9}", "checkpoint.folder=run", "train.steps=7"});
  train_ranks(2,
              {"train.early_stop={patience: 9, metric: loss, mode: max}", "checkpoint.folder=run"});
  EXPECT_THAT(out_, HasSubstr("train.early_stop ranked by loss before"));
  EXPECT_EQ(saved_height(), 8) << "the loss falls, so the highest one after 7 steps comes next";
}

TEST_F(KeepBestTest, TheBestWeightsSurviveAResumeWithOtherRanksAndAnotherWrapper) {
  for (const auto& from : testing::kWrappers) {
    for (const auto& to : testing::kWrappers) {
      std::filesystem::remove_all("run");
      train_ranks(3, {kStop, "checkpoint.folder=run", "train.steps=7", from});
      EXPECT_EQ(saved_height(), 5);
      const auto result = train_ranks(2, {kStop, "checkpoint.folder=run", to});
      EXPECT_EQ(result.losses.size(), 1u) << "three evaluations after the best one";
      EXPECT_EQ(saved_height(), 5) << from << " " << to;
      EXPECT_EQ(saved_forwards(), 5) << from << " " << to;
      // The checkpoint goes on with the last weights, also without the early stop.
      train_ranks(2, {"checkpoint.folder=run", "train.steps=9", to});
      EXPECT_EQ(saved_height(), 9) << from << " " << to;
    }
  }
}

TEST_F(KeepBestTest, TheBestWeightsAreTheAveragedOnesWithEma) {
  train_ranks(2, {"train.steps=5", "train.ema.decay=0.5"});
  const double averaged = saved_height();  // 4.03: nearer to 5 is that after 6 steps, 5.02
  train_ranks(2, {"train.steps=6", "train.ema.decay=0.5"});
  const double best = saved_height();
  EXPECT_LT(std::abs(best - 5), std::abs(averaged - 5));
  train_ranks(2, {kStop, "train.ema.decay=0.5"});
  EXPECT_EQ(saved_height(), best);
}

TEST_F(KeepBestTest, WithoutEvaluationsItIsAnErrorBeforeTheFirstStep) {
  const auto fails = [&](std::vector<std::string> overrides) {
    overrides.push_back("data.type=WithoutValidation");
    return testing::thrown_by([&] { train_ranks(2, overrides); });
  };
  EXPECT_THAT(fails({"checkpoint.folder=run", "checkpoint.keep_best={}"}),
              HasSubstr("checkpoint.keep_best: there are no evaluations, because data.type "
                        "WithoutValidation has no evaluation samples"));
  EXPECT_THAT(fails({"train.early_stop.patience=2"}), HasSubstr("train.early_stop: there are no"));
  EXPECT_THAT(fails({}), HasSubstr("metrics: there are no evaluations"));
}

const std::string kFsdp = "parallel.type=FullyShardedDataParallel";

class MmengineFlow : public testing::TrainFixture {};

TEST_F(MmengineFlow, OneConfigRunsOnTwoRanksAndResumesOnThree) {
  std::ofstream("c.yaml") << R"(
model: {type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2, seed: 1}
data: {type: ByteText, path: text.txt, seq_len: 16}
optimizer: {type: AdamW, lr: 3e-3, paramwise: {norm_decay_mult: 0}}
scheduler: {type: constant, warmup_steps: 4}
parallel: {type: FullyShardedDataParallel, wrap_policy: leaves}
metrics: [perplexity, accuracy]
train: {steps: 12, global_batch: 12, accumulation: 2, autocast: bfloat16, clip_grad_norm: 1,
        ema: {decay: 0.5}, eval_every: 3, eval_batches: 2, eval_batch: 5, log: out/log.jsonl,
        save: out/model.safetensors, early_stop: {patience: 9, metric: perplexity, mode: min}}
checkpoint: {folder: run, every: 2, keep_last: 1, keep_best: {metric: accuracy, mode: max}}
)";
  const auto whole = train_ranks(2, {kFsdp, "checkpoint.folder=whole"});
  const auto log_of_whole = log();
  train_ranks(2, {kFsdp, "train.steps=7"});
  const auto resumed = train_ranks(3, {kFsdp});
  EXPECT_EQ(resumed.first_step, 7);
  for (const std::string figure : {"loss", "perplexity", "accuracy"})
    EXPECT_NEAR(resumed.eval_figures.at(figure) / whole.eval_figures.at(figure), 1, 0.05) << figure;
  ASSERT_EQ(log().size(), 12u);
  for (const size_t step : {2, 5, 8, 11})
    EXPECT_TRUE(log()[step].contains("eval_perplexity") &&
                log_of_whole[step].contains("eval_loss"));
  const auto state = nlohmann::json::parse(bytes_of("run/step-00000012/state.json"));
  const auto best = state["keep_best"]["checkpoints"].at(0)["step"].get<int64_t>();
  EXPECT_TRUE(std::filesystem::exists(fmt::format("run/step-{:08d}/manifest.json", best)));
  EXPECT_TRUE(std::filesystem::exists("out/model.safetensors"));
}

}  // namespace
}  // namespace tessera
