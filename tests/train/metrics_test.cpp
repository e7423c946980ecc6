#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "harness/thrown_by.h"
#include "tessera/safetensors.h"
#include "tessera/train/model_wrapper.h"
#include "tessera/train/registries.h"
#include "train/hooks/hooks.h"
#include "train/run/evaluate.h"
#include "train_fixture.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Metric metric(const std::string& name, const OptionMap& options = {}) {
  return registry::metrics().make(name, options);
}

/// The figures of a metric whose samples come in batches of these sizes, one after another.
std::vector<double> figures(const Metric& metric, const at::Tensor& prediction,
                            const at::Tensor& targets, const std::vector<int64_t>& sizes) {
  at::Tensor total;
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    const at::Tensor part =
        metric.accumulate(prediction.narrow(0, begin, size), {{}, targets.narrow(0, begin, size)})
            .to(at::kDouble);
    total = !total.defined() ? part : metric.merge ? metric.merge(total, part) : total + part;
    begin += size;
  }
  EXPECT_EQ(begin, targets.size(0));
  return metric.result(total);
}

/// The same for one batch, after a comparison with other divisions.
std::vector<double> figures(const Metric& metric, const at::Tensor& prediction,
                            const at::Tensor& targets) {
  const int64_t n = targets.size(0);
  const auto all = figures(metric, prediction, targets, {n});
  for (const auto& sizes : {std::vector<int64_t>{1, n - 1}, {n - 2, 1, 1}}) {
    const auto divided = figures(metric, prediction, targets, sizes);
    for (size_t i = 0; i < all.size(); ++i) EXPECT_NEAR(divided[i], all[i], 1e-12);
  }
  return all;
}

/// Scores whose highest ones are `classes`.
at::Tensor scores_of(const std::vector<int64_t>& classes, int64_t count) {
  return at::one_hot(torch::tensor(classes), count).to(at::kFloat);
}

TEST(Metrics, ClassesAreCountedAsScikitLearnDoes) {
  // sklearn.metrics.f1_score's example: macro 0.2667, micro 0.3333.
  const at::Tensor targets = torch::tensor({0, 1, 2, 0, 1, 2}, at::kLong);
  const at::Tensor scores = scores_of({0, 2, 1, 0, 0, 1}, 3);
  EXPECT_THAT(figures(metric("accuracy"), scores, targets), ElementsAre(2.0 / 6));
  const auto f1 = figures(metric("f1"), scores, targets);
  EXPECT_NEAR(f1[0], 1.0 / 3, 1e-12);
  EXPECT_NEAR(f1[1], 0.8 / 3, 1e-12);
  EXPECT_THAT(figures(metric("confusion", {{"classes", int64_t{3}}}), scores, targets),
              ElementsAre(2, 0, 0, 1, 0, 1, 0, 2, 0));
  // Class 3 occurs neither in predictions nor in targets.
  EXPECT_NEAR(figures(metric("f1"), scores_of({0, 2, 1, 0, 0, 1}, 4), targets)[1], 0.8 / 3, 1e-12);
  // Intersections 2, 0, 0 over unions 3, 4, 4.
  EXPECT_NEAR(figures(metric("mean_iou"), scores, targets)[0], 2.0 / 9, 1e-12);
}

TEST(Metrics, TopKCountsTheKHighestScores) {
  const at::Tensor scores =
      torch::tensor({{0.1, 0.2, 0.7}, {0.5, 0.3, 0.2}, {0.2, 0.3, 0.5}, {0.4, 0.5, 0.1}});
  const at::Tensor targets = torch::tensor({1, 2, 2, 1}, at::kLong);
  EXPECT_THAT(figures(metric("top_k", {{"k", int64_t{1}}}), scores, targets), ElementsAre(0.5));
  EXPECT_THAT(figures(metric("top_k", {{"k", int64_t{2}}}), scores, targets), ElementsAre(0.75));
  EXPECT_THAT(metric("top_k").figures, ElementsAre("top_5"));
}

TEST(Metrics, TargetsOfMapsAndSequencesMayBeIgnored) {
  const at::Tensor targets = torch::tensor({{0, 1, 255}, {1, 255, 0}}, at::kByte);
  const at::Tensor sequence = scores_of({0, 0, 0, 1, 1, 0}, 2).view({2, 3, 2});
  const OptionMap ignore{{"ignore_index", int64_t{255}}};
  EXPECT_THAT(figures(metric("accuracy", ignore), sequence, targets, {1, 1}), ElementsAre(0.75));
  // The same as maps of 1 x 3 pixels.
  EXPECT_THAT(figures(metric("accuracy", ignore), sequence.movedim(2, 1).unsqueeze(2),
                      targets.unsqueeze(1), {1, 1}),
              ElementsAre(0.75));
}

TEST(Metrics, ASampleMayHaveSeveralLabels) {
  const at::Tensor scores = torch::tensor({{1.0, -1.0}, {2.0, 0.5}, {-1.0, -2.0}, {0.1, 3.0}});
  const at::Tensor targets = torch::tensor({{1.0, 0.0}, {0.0, 1.0}, {1.0, 0.0}, {1.0, 1.0}});
  EXPECT_THAT(figures(metric("accuracy"), scores, targets), ElementsAre(6.0 / 8));
  const auto f1 = figures(metric("f1"), scores, targets);  // counts: (2, 3, 3) and (2, 2, 2)
  EXPECT_NEAR(f1[0], 8.0 / 10, 1e-12);
  EXPECT_NEAR(f1[1], (4.0 / 6 + 1) / 2, 1e-12);
}

TEST(Metrics, ErrorsOfNumbersAreThoseOfScikitLearn) {
  // The examples of sklearn.metrics' pages.
  const at::Tensor targets = torch::tensor({3.0, -0.5, 2.0, 7.0});
  const at::Tensor values = torch::tensor({2.5, 0.0, 2.0, 8.0}).view({4, 1});
  EXPECT_NEAR(figures(metric("mae"), values, targets)[0], 0.5, 1e-12);
  EXPECT_NEAR(figures(metric("mse"), values, targets)[0], 0.375, 1e-12);
  EXPECT_NEAR(figures(metric("r2"), values, targets)[0], 0.9486081370449679, 1e-12);
  EXPECT_TRUE(std::isnan(figures(metric("r2"), values, at::ones({4}), {1, 3})[0]));
}

TEST(Metrics, R2KeepsItsDigitsWhereTheMeanIsLarge) {
  const at::Tensor noise = at::linspace(-1, 1, 100, at::kDouble);
  const at::Tensor targets = noise + 1e9;
  const double r2 = figures(metric("r2"), targets + 0.5, targets, {7, 13, 30, 49, 1})[0];
  EXPECT_NEAR(r2, 1 - 25.0 / noise.square().sum().item<double>(), 1e-6);
}

TEST(Metrics, PerplexityIsOverTokensAndALossOverSamples) {
  torch::manual_seed(3);
  const at::Tensor logits = torch::randn({4, 5, 7});
  at::Tensor tokens = torch::randint(7, {4, 5}, at::kLong);
  tokens.index_put_({0}, -100);
  const at::Tensor each = -logits.log_softmax(2).gather(2, tokens.clamp_min(0).unsqueeze(2));
  const double mean = each.slice(0, 1).to(at::kDouble).mean().item<double>();
  EXPECT_NEAR(figures(metric("perplexity"), logits, tokens)[0], std::exp(mean), 1e-5);

  const ConfigNode options = parse_yaml("{loss: {type: l1}}", "test", false);
  OptionReader reader(&options, {"metrics"}, "test");
  const Metric loss = registry::metrics().read("loss", reader);
  EXPECT_THAT(loss.figures, ElementsAre("l1_loss"));
  const at::Tensor values = torch::tensor({1.0, 2.0, 6.0});
  EXPECT_NEAR(figures(loss, values, at::zeros({3}), {2, 1})[0], 3, 1e-6);
}

TEST(Metrics, AWrongShapeIsAnErrorAndIsNeverBroadcast) {
  const auto fails = [](const Metric& metric, const at::Tensor& prediction,
                        const at::Tensor& targets) {
    return testing::thrown_by([&] { metric.accumulate(prediction, {{}, targets}); });
  };
  EXPECT_THAT(fails(metric("mse"), at::zeros({8, 2}), at::zeros({8})),
              HasSubstr("a prediction of shape [8, 2] and targets of shape [8]; expected equal"));
  EXPECT_THAT(fails(metric("accuracy"), at::zeros({8, 2}), at::zeros({7}, at::kLong)),
              HasSubstr("expected numbers of classes"));
  EXPECT_THAT(fails(metric("accuracy"), at::zeros({8, 2}), at::zeros({8})),
              HasSubstr("expected numbers of classes"));
  EXPECT_THAT(fails(metric("f1"), at::zeros({8, 2}), at::full({8}, 2, at::kLong)),
              HasSubstr("target 2 is no class; expected numbers below 2, or ignore_index (-100)"));
  EXPECT_THAT(fails(metric("top_k"), at::zeros({8, 2}), at::zeros({8}, at::kLong)),
              HasSubstr("k is 5, and the prediction has 2 classes"));
  EXPECT_THAT(fails(metric("confusion", {{"classes", int64_t{3}}}), at::zeros({8, 2}),
                    at::zeros({8}, at::kLong)),
              HasSubstr("classes is 3, and the prediction has 2"));
  EXPECT_THAT(testing::thrown_by([] { metric("acuracy"); }),
              HasSubstr("did you mean \"accuracy\"?"));
}

/// A linear classifier whose forwards are counted.
struct ScorerImpl : torch::nn::Module {
  static inline std::atomic<int> forwards{0};
  ScorerImpl() : linear(register_module("linear", torch::nn::Linear(3, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    ++forwards;
    return linear(x);
  }
  torch::nn::Linear linear;
};
TORCH_MODULE(Scorer);

/// 37 samples for evaluation: no number of ranks and no batch divides them.
struct Scored : Dataset {
  explicit Scored(int64_t count = 37) : count_(count) {}
  int64_t size() const override { return count_; }
  std::string describe() const override { return "scored"; }
  Batch get(const std::vector<int64_t>& samples) const override {
    const at::Tensor i = torch::tensor(samples, at::kLong) % size();
    const at::Tensor x = torch::stack({(i * 1.7).sin(), (i * 0.3).cos(), i * 0.05}, 1);
    return {x.to(at::kFloat), (i * i + i.div(5, "floor")) % 4};
  }
  std::shared_ptr<const Dataset> validation() const { return std::make_shared<Scored>(); }
  int64_t count_;
};

TEST(Evaluation, MakesOneAllReduceForTheLossesAndOneForEachMetric) {
  testing::run_ranks(3, [&](ProcessGroup group, int) {
    TrainedModel model = detail::trained_model(std::make_shared<ScorerImpl>());
    model.loss = [predict = model.predict](const Batch& batch) -> Losses {
      return {{"loss", at::cross_entropy_loss(predict(batch), batch.targets)}};
    };
    const ConfigNode options = parse_yaml("{type: DistributedDataParallel}", "test", false);
    OptionReader reader(&options, {"parallel"}, "test");
    std::string type;
    reader.read_choice("type", type, registry::parallel().names(), "");
    const auto wrapper = registry::parallel()
                             .read(type, reader)
                             .make({model, nullptr, group, {"SGD", {{"lr", 0.1}}, {}}});
    const std::vector<Metric> metrics{metric("accuracy"), metric("f1")};
    const auto before = group.stats().calls();
    int64_t samples = 0;
    train::evaluate(
        *wrapper, Scored(), {0, 8, metrics, false}, [] {},
        [&](int64_t, const Evaluated& batch) { samples += batch.prediction.size(0); });
    EXPECT_EQ(group.stats().calls() - before, 3u);
    const at::Tensor all = at::scalar_tensor(samples, at::kLong).reshape({1});
    group.all_reduce(all);
    EXPECT_EQ(all.item<int64_t>(), 37) << "each sample on one rank";
  });
}

class MetricsTest : public testing::TrainFixture {
 protected:
  void SetUp() override {
    TrainFixture::SetUp();
    if (!registry::models().contains("Scorer")) {
      registry::models().add<Scorer>("Scorer");
      registry::datasets().add<Scored>("Scored");
      registry::metrics().add_plan(
          "half",
          {{"half"},
           [](const at::Tensor& prediction, const Batch&) { return prediction.sum() / 2; },
           [](const at::Tensor& total) { return std::vector<double>{total.item<double>()}; }});
    }
    std::ofstream("c.yaml") << "model: {type: Scorer, seed: 1}\ndata: {type: Scored}\n"
                               "loss: {type: cross_entropy}\noptimizer: {type: SGD, lr: 0.1}\n"
                               "train: {steps: 2, global_batch: 12, log: out/log.jsonl,"
                               " save: out/model.safetensors}\n";
  }
};

const char* const kAll =
    "metrics=[accuracy, {type: top_k, k: 2}, {type: confusion, classes: 4}, f1, mean_iou, "
    "perplexity, {type: loss, loss: cross_entropy}, {type: half, prefix: own_}]";

TEST_F(MetricsTest, FiguresAreEqualForAnyNumberOfRanksAndThoseOfTheWholeSet) {
  for (const std::string batch : {"1", "5", "8", "64"}) {
    const std::vector<std::string> overrides{kAll, "train.eval_batch=" + batch, "train.steps=0"};
    const auto alone = train_ranks(1, overrides).eval_figures;
    const SafetensorsFile weights("out/model.safetensors");
    const Batch all = Scored().get([] {
      std::vector<int64_t> samples(37);
      std::iota(samples.begin(), samples.end(), 0);
      return samples;
    }());
    const at::Tensor scores =
        at::linear(all.inputs, weights.load("linear.weight"), weights.load("linear.bias"));
    const double loss = at::cross_entropy_loss(scores.to(at::kDouble), all.targets).item<double>();
    const auto right = scores.argmax(1).eq(all.targets);
    EXPECT_EQ(alone.at("accuracy"), right.to(at::kDouble).mean().item<double>());
    const at::Tensor best = std::get<1>(scores.topk(2, 1)).eq(all.targets.unsqueeze(1)).any(1);
    EXPECT_EQ(alone.at("top_2"), best.to(at::kDouble).mean().item<double>());
    for (int i = 0; i < 16; ++i)
      EXPECT_EQ(alone.at(fmt::format("confusion_{}_{}", i / 4, i % 4)),
                all.targets.eq(i / 4).logical_and(scores.argmax(1).eq(i % 4)).sum().item<double>());
    EXPECT_EQ(alone.at("f1_micro"), alone.at("accuracy"));
    EXPECT_EQ(alone.at("f1_macro"), figures(metric("f1"), scores, all.targets, {37})[1]);
    EXPECT_EQ(alone.at("mean_iou"), figures(metric("mean_iou"), scores, all.targets, {37})[0]);
    EXPECT_NEAR(alone.at("perplexity"), std::exp(loss), 1e-6);
    EXPECT_NEAR(alone.at("cross_entropy_loss"), loss, 1e-6);
    EXPECT_NEAR(alone.at("loss"), loss, 1e-6);
    EXPECT_NEAR(alone.at("own_half"), scores.to(at::kDouble).sum().item<double>() / 2, 1e-5);
    for (const int world : {2, 3, 4}) {
      for (const auto& wrapper : testing::kWrappers) {
        auto with = overrides;
        with.push_back(wrapper);
        EXPECT_EQ(train_ranks(world, with).eval_figures, alone) << world << " " << wrapper;
      }
    }
  }
}

TEST_F(MetricsTest, TheModelRunsOnceForLossAndMetrics) {
  ScorerImpl::forwards = 0;
  train_ranks(1, {kAll, "train.steps=0", "train.eval_batch=10"});
  EXPECT_EQ(ScorerImpl::forwards, 4);
}

TEST_F(MetricsTest, TheLogHasThemAndEvalBatchChangesNoFigureButRounding) {
  train_ranks(2, {"metrics=[accuracy]", "train.eval_every=1", "train.steps=2"});
  for (const auto& line : log()) EXPECT_TRUE(line.contains("eval_accuracy")) << line;
  EXPECT_THAT(out_, HasSubstr("  accuracy 0."));
}

TEST_F(MetricsTest, PredictionsAreWrittenInTheOrderOfTheSamples) {
  for (const int world : {1, 3, 4}) {
    train_ranks(world, {"hooks=[{type: Predictions, path: p.safetensors}]", "train.steps=0",
                        "train.eval_batch=3"});
    const SafetensorsFile weights("out/model.safetensors"), written("p.safetensors");
    std::vector<int64_t> samples(37);
    std::iota(samples.begin(), samples.end(), 0);
    const Batch all = Scored().get(samples);
    const at::Tensor scores =
        at::linear(all.inputs, weights.load("linear.weight"), weights.load("linear.bias"));
    EXPECT_TRUE(at::allclose(written.load("predictions"), scores)) << world;
    EXPECT_TRUE(at::equal(written.load("targets"), all.targets)) << world;
  }
  EXPECT_THAT(testing::thrown_by([&] {
                train_ranks(2, {"hooks=[{type: Predictions, path: absent/p.safetensors}]"});
              }),
              HasSubstr("absent/p.safetensors"));
}

TEST(Predictions, NeedARowForEachSample) {
  const auto hook = train::predictions_hook({"p.safetensors"});
  const auto error = [&](const at::Tensor& targets, const at::Tensor& prediction) {
    const Evaluated evaluated{{torch::zeros({3, 2}), targets}, prediction};
    return testing::thrown_by([&] { hook->on_predictions({0, evaluated, false}); });
  };
  const std::string text = "predictions: 3 samples have predictions or targets of shape ";
  EXPECT_THAT(error(torch::zeros({3}), torch::zeros({6, 4})), HasSubstr(text + "[6, 4]"));
  EXPECT_THAT(error(torch::zeros({6}), torch::zeros({3, 4})), HasSubstr(text + "[6]"));
  EXPECT_THAT(error({}, torch::zeros({})), HasSubstr(text + "[]"));
  EXPECT_EQ(error(torch::zeros({3}), torch::zeros({3, 4})), "no error");
}

TEST_F(MetricsTest, ANameOfPyTorchThatTheProgramHasRegisteredIsItsOwn) {
  const auto load = [&] { load_config("c.yaml", {"hooks=[EMAHook]"}); };
  EXPECT_THAT(testing::thrown_by(load), HasSubstr("expected train.ema"));
  registry::hooks().add_plan("EMAHook", [] { return std::make_shared<RunHook>(); });
  EXPECT_EQ(testing::thrown_by(load), "no error");
}

TEST_F(MetricsTest, WrongNamesAreErrorsBeforeTheRun) {
  const auto fails = [&](const std::vector<std::string>& overrides) {
    return testing::thrown_by([&] { load_config("c.yaml", overrides); });
  };
  const std::string folder = "checkpoint.folder=run", every = "train.eval_every=1";
  EXPECT_THAT(fails({"metrics=[acuracy]"}), HasSubstr("metrics.0.type: acuracy; expected one of"));
  EXPECT_THAT(fails({"metrics=[{type: top_k, kk: 3}]"}), HasSubstr("metrics.0.kk: unknown key"));
  EXPECT_THAT(fails({"metrics=[accuracy, accuracy]"}),
              HasSubstr("metrics.1.type: accuracy has the figure accuracy, as a metric before it"));
  EXPECT_THAT(fails({"metrics=[{type: loss}]"}), HasSubstr("metrics.0.loss"));
  const auto best = [&](const std::string& keys) {
    return fails(
        {"metrics=[accuracy, {type: top_k, k: 3}]", folder, every, "checkpoint.keep_best=" + keys});
  };
  EXPECT_THAT(best("{metric: acuracy, mode: max}"),
              HasSubstr("checkpoint.keep_best.metric: \"acuracy\" is not evaluated; did you mean "
                        "\"accuracy\"?"));
  EXPECT_THAT(
      best("{metric: mean_iou, mode: max}"),
      HasSubstr("\"mean_iou\" is not evaluated; expected it in section metrics: [mean_iou]"));
  EXPECT_THAT(best("{metric: accuracy}"), HasSubstr("checkpoint.keep_best.mode: missing"));
  EXPECT_THAT(best("{metric: accuracy, mode: maks}"), HasSubstr("keep_best.mode: maks"));
  EXPECT_THAT(best("{metric: accuracy, mode: max, count: -1}"), HasSubstr("keep_best.count: -1"));
  EXPECT_THAT(fails({"checkpoint.keep_best={}", folder}), HasSubstr("train.eval_every > 0"));
  EXPECT_THAT(fails({"checkpoint.keep_best={count: 2}", every}),
              HasSubstr("has no meaning without checkpoint.folder"));
  EXPECT_THAT(fails({every, "train.early_stop={patience: 2, metric: accuracy, mode: max}"}),
              HasSubstr("train.early_stop.metric: \"accuracy\" is not evaluated"));
}

}  // namespace
}  // namespace tessera
