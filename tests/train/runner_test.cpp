#include <cmath>

#include <torch/nn/functional.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/safetensors.h"
#include "tessera/train/model_wrapper.h"
#include "tessera/train/optim_wrapper.h"
#include "tessera/train/registries.h"
#include "train/train_fixture.h"

// Steps and what stands around them: OptimWrapper's rules, precision, averages, schedules, hooks,
// own components.

namespace tessera {
namespace {

using testing::expect_near;
using testing::kWrappers;
using RunnerTest = testing::TrainFixture;

struct LineImpl : torch::nn::Module {
  LineImpl()
      : linear(register_module("linear",
                               torch::nn::Linear(torch::nn::LinearOptions(3, 1).bias(false)))) {}
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear;
};

/// A line with given weights under a wrapper of this type, with plain SGD.
std::unique_ptr<ModelWrapper> wrapped(const std::string& parallel, ProcessGroup group,
                                      const OptimizerPlan& optimizer = {"SGD", {{"lr", 0.1}}, {}}) {
  const auto line = std::make_shared<LineImpl>();
  {
    const torch::NoGradGuard no_grad;
    line->linear->weight.copy_(torch::tensor({{0.5f, -0.25f, 1.0f}}));
  }
  TrainedModel model = detail::trained_model(line);
  model.loss = [predict = model.predict](const Batch& batch) -> Losses {
    return {{"loss", torch::mse_loss(predict(batch), batch.targets)}};
  };
  const ConfigNode options = parse_yaml(parallel, "test", false);
  OptionReader reader(&options, {"parallel"}, "test");
  std::string type;
  reader.read_choice("type", type, registry::parallel().names(), "");
  return registry::parallel().read(type, reader).make({model, nullptr, group, optimizer});
}

Batch batch_of(int64_t number) {
  const at::Tensor x =
      torch::arange(6, torch::kFloat).reshape({2, 3}).sin() + static_cast<double>(number) / 3;
  return {x, x.sum(1, true).cos()};
}

at::Tensor whole_weight(ModelWrapper& model) {
  std::vector<at::Tensor> parts;
  at::Tensor mine = at::zeros({3});
  for (const auto& shard : model.shards())
    mine.narrow(0, shard.begin, shard.numel).copy_(shard.tensor.detach().reshape({-1}));
  return mine;
}

const std::vector<std::string> kTypes{
    "{type: DistributedDataParallel}", "{type: ZeroRedundancyOptimizer}",
    "{type: DistributedOptimizer, reduce_method: mean}", "{type: FullyShardedDataParallel}"};

TEST(OptimWrapper, AccumulationDividesByTheCountAndTheTailByWhatIsLeft) {
  // mmengine: 5 iterations, 2 at a time: updates after 2, 4 and, alone, 5.
  const auto model = wrapped("{type: none}", ProcessGroup());
  OptimWrapper optimizer(*model, {.accumulative_counts = 2});
  optimizer.initialize_count_status(0, 5);
  const std::vector<bool> updates{false, true, false, true, true};
  const std::vector<double> factors{2, 2, 2, 2, 1};
  const auto& line = dynamic_cast<LineImpl&>(*model->model().module);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(optimizer.should_update(), updates[i]) << i;
    EXPECT_EQ(optimizer.scale_factor(), factors[i]) << i;
    const at::Tensor before = line.linear->weight.detach().clone();
    model->train_step(batch_of(static_cast<int64_t>(i)), optimizer);
    EXPECT_EQ(optimizer.updated(), updates[i]) << i;
    EXPECT_EQ(!at::equal(before, line.linear->weight), updates[i]) << i;
  }
  // The same by hand.
  at::Tensor weight = torch::tensor({{0.5f, -0.25f, 1.0f}}).requires_grad_();
  for (const std::vector<int64_t>& group : {std::vector<int64_t>{0, 1}, {2, 3}, {4}}) {
    at::Tensor loss = at::zeros({});
    for (const int64_t i : group)
      loss =
          loss + torch::mse_loss(torch::linear(batch_of(i).inputs, weight), batch_of(i).targets) /
                     static_cast<double>(group.size());
    loss.backward();
    const torch::NoGradGuard no_grad;
    weight -= 0.1 * weight.grad();
    weight.mutable_grad() = at::Tensor();
  }
  EXPECT_TRUE(at::allclose(weight, line.linear->weight, 1e-6, 1e-7))
      << weight << line.linear->weight;
  EXPECT_THROW(OptimWrapper(*model, {.accumulative_counts = 0}), UsageError);
  EXPECT_THROW(optimizer.initialize_count_status(6, 5), UsageError);
}

TEST(OptimWrapper, AccumulationCommunicatesOncePerUpdate) {
  for (const auto& type : kTypes) {
    for (const int world : {2, 3}) {
      testing::run_ranks(world, [&](ProcessGroup group, int rank) {
        const auto bytes = [&](int64_t counts) {
          const auto model = wrapped(type, group);
          OptimWrapper optimizer(*model, {.accumulative_counts = counts});
          for (int64_t i = 0; i < 4; ++i)
            model->train_step(batch_of(i + rank), optimizer);  // learns the order
          group.reset_stats();
          for (int64_t i = 0; i < 4; ++i) model->train_step(batch_of(i + rank), optimizer);
          const CommStats stats = group.stats();
          return stats.all_reduce.bytes_received + stats.reduce_scatter.bytes_received;
        };
        const uint64_t often = bytes(1), seldom = bytes(4);
        EXPECT_GT(seldom, 0u) << type;
        EXPECT_LE(seldom * 4, often)
            << type << " world " << world << ": a quarter of the reductions";
      });
    }
  }
}

TEST(OptimWrapper, AnInfinityOnOneRankSkipsTheStepOnAll) {
  for (const auto& type : kTypes) {
    testing::run_ranks(3, [&](ProcessGroup group, int rank) {
      const auto model = wrapped(type, group);
      OptimWrapperOptions options;
      options.scaler = {.enabled = true, .init_scale = 1024};
      OptimWrapper optimizer(*model, options);
      Batch batch = batch_of(rank);
      model->train_step(batch, optimizer);
      EXPECT_FALSE(optimizer.skipped()) << type;
      const at::Tensor before = whole_weight(*model);
      Batch bad = batch_of(rank);
      if (rank == 1) bad.targets = bad.targets * INFINITY;
      model->train_step(bad, optimizer);
      EXPECT_TRUE(optimizer.skipped()) << type << " rank " << rank;
      EXPECT_TRUE(at::equal(before, whole_weight(*model))) << type;
      EXPECT_EQ(optimizer.scaler().scale(), 512) << type;
      model->train_step(batch, optimizer);
      EXPECT_TRUE(optimizer.updated()) << type;
      EXPECT_TRUE(whole_weight(*model).isfinite().all().item<bool>()) << type;
    });
  }
}

TEST(OptimWrapper, LossScalingAndLooseClippingDoNotChangeTheUpdate) {
  for (const auto& type : kTypes) {
    for (const int world : {1, 2, 4}) {
      testing::run_ranks(world, [&](ProcessGroup group, int rank) {
        const auto train = [&](OptimWrapperOptions options) {
          const auto model = wrapped(type, group);
          OptimWrapper optimizer(*model, options);
          for (int64_t i = 0; i < 5; ++i) model->train_step(batch_of(i + rank), optimizer);
          return std::pair(whole_weight(*model), optimizer.grad_norm());
        };
        const auto plain = train({});
        OptimWrapperOptions scaled;
        scaled.scaler = {.enabled = true, .dynamic = false, .init_scale = 256};
        EXPECT_TRUE(at::allclose(train(scaled).first, plain.first, 1e-6, 1e-7)) << type;
        EXPECT_TRUE(at::equal(train({.clip_grad_norm = 1e6}).first, plain.first)) << type;
        EXPECT_TRUE(at::equal(train({.clip_grad_value = 1e6}).first, plain.first)) << type;
        const auto clipped = train({.clip_grad_norm = 1e-3, .clip_grad_value = 1e-5}).first;
        const at::Tensor start = torch::tensor({0.5f, -0.25f, 1.0f});
        for (const auto& shard : wrapped(type, group)->shards()) {
          const at::Tensor moved = (clipped - start).narrow(0, shard.begin, shard.numel).abs();
          EXPECT_LE(moved.numel() ? moved.max().item<double>() : 0, 5 * 0.1 * 1.05e-5) << type;
        }
      });
    }
  }
}

TEST(OptimWrapper, StateDictIsGatheredOnRank0AndEmptyOnOtherRanks) {
  for (const int world : {1, 3}) {
    std::map<std::string, at::Tensor> averages;
    for (const auto& type : kTypes) {
      OptimizerStateDict saved;
      testing::run_ranks(world, [&](ProcessGroup group, int rank) {
        const auto model = wrapped(type, group, {"Adam", {{"lr", 0.1}}, {}});
        OptimWrapper optimizer(*model);
        for (int64_t i = 0; i < 3; ++i) model->train_step(batch_of(i), optimizer);
        const OptimizerStateDict dict = optimizer.state_dict();
        EXPECT_EQ(dict.state.size(), rank == 0 ? 1u : 0u) << type;
        if (rank == 0) saved = dict;
      });
      const at::Tensor average = saved.state.at("linear.weight").tensors.at("exp_avg");
      EXPECT_EQ(average.sizes(), (std::vector<int64_t>{1, 3})) << type;
      averages[type] = average;
      EXPECT_TRUE(at::allclose(average, averages.begin()->second, 1e-6, 1e-8)) << type;
      testing::run_ranks(2, [&](ProcessGroup group, int rank) {
        const auto model = wrapped(type, group, {"Adam", {{"lr", 0.1}}, {}});
        OptimWrapper optimizer(*model);
        optimizer.load_state_dict(saved);
        const OptimizerStateDict again = optimizer.state_dict();
        if (rank == 0)
          EXPECT_TRUE(at::equal(again.state.at("linear.weight").tensors.at("exp_avg"), average))
              << type;
      });
    }
  }
}

TEST_F(RunnerTest, AccumulatedStepsEqualWholeSteps) {
  const auto reference = train_ranks(1, {});
  for (const auto& wrapper : kWrappers) {
    const auto result = train_ranks(2, {wrapper, "train.accumulation=3"});
    expect_near(result.losses, reference.losses, 1e-5);
    expect_near(result.grad_norms, reference.grad_norms, 1e-3);
  }
  EXPECT_THROW(train_ranks(2, {"train.accumulation=4"}), UsageError);
}

TEST_F(RunnerTest, MixedPrecisionTrains) {
  const auto reference = train_ranks(1, {"train.steps=20"});
  for (const auto& wrapper : kWrappers) {
    const auto result = train_ranks(2, {wrapper, "train.steps=20", "train.autocast=bfloat16",
                                        "train.loss_scale={init_scale: 64}"});
    EXPECT_NE(result.losses, reference.losses);
    expect_near(result.losses, reference.losses, 0.02);
    EXPECT_EQ(result.skipped_steps, 0);
  }
}

TEST_F(RunnerTest, WeightAveragesAreTheSameForShards) {
  const std::vector<std::string> ema{"train.ema.decay=0.9", "train.eval_every=2"};
  const auto with = [&](std::string wrapper) {
    return std::vector<std::string>{ema[0], ema[1], std::move(wrapper)};
  };
  const auto plain = train_ranks(1, {"train.eval_every=2"});
  const auto reference = train_ranks(1, ema);
  EXPECT_EQ(reference.losses, plain.losses) << "an average only looks";
  EXPECT_GT(*reference.eval_loss, *plain.eval_loss) << "it lags behind";
  EXPECT_LT(*reference.eval_loss,
            0.99 * *train_ranks(1, {"train.steps=0", "train.save=null", "train.save_config=false"})
                        .eval_loss);
  const SafetensorsFile expected("out/model.safetensors");
  for (const auto& wrapper : kWrappers) {
    for (const int world : {1, 2, 3}) {
      const auto result = train_ranks(world, with(wrapper));
      EXPECT_NEAR(*result.eval_loss, *reference.eval_loss, 1e-5 * *reference.eval_loss) << wrapper;
      expect_near(result.losses, reference.losses, 1e-5);
      const SafetensorsFile file("out/model.safetensors");
      for (const auto& name : expected.names()) {
        EXPECT_TRUE(at::allclose(file.load(name), expected.load(name), 1e-4, 1e-5))
            << name << wrapper;
      }
    }
  }
}

TEST_F(RunnerTest, ParamwiseOptionsReachTheOptimizerOfEveryWrapper) {
  const std::string rules =
      "optimizer.paramwise={norm_decay_mult: 0, bias_lr_mult: 2, custom_keys: {wte: {lr_mult: "
      "0.1}, wpe: {lr_mult: "
      "0}}}";
  const auto reference = train_ranks(1, {rules});
  const SafetensorsFile expected("out/model.safetensors");
  EXPECT_NE(reference.losses, train_ranks(1, {}).losses);
  train_ranks(1, {"train.steps=0", "train.save=initial.safetensors"});
  train_ranks(1, {rules, "scheduler={type: linear, start_factor: 1, end_factor: 0.5}"});
  const SafetensorsFile initial("initial.safetensors"), ruled("out/model.safetensors");
  EXPECT_TRUE(
      at::equal(ruled.load("transformer.wpe.weight"), initial.load("transformer.wpe.weight")))
      << "lr_mult: 0";
  EXPECT_FALSE(
      at::equal(ruled.load("transformer.wte.weight"), initial.load("transformer.wte.weight")));
  for (const auto& wrapper : kWrappers) {
    const auto result = train_ranks(
        2, {wrapper, rules, "scheduler={type: linear, start_factor: 1, end_factor: 0.5}"});
    const auto same =
        train_ranks(1, {rules, "scheduler={type: linear, start_factor: 1, end_factor: 0.5}"});
    expect_near(result.losses, same.losses, 1e-5);
  }
  EXPECT_THROW(train_ranks(1, {"optimizer.paramwise={custom_keys: {wtee: {lr_mult: 0.1}}}"}),
               UsageError);
}

TEST_F(RunnerTest, EarlyStopEndsAllRanks) {
  const auto result = train_ranks(2, {"optimizer={type: SGD, lr: 0}", "train.steps=50",
                                      "train.eval_every=2", "train.early_stop.patience=3"});
  EXPECT_EQ(result.losses.size(), 8u)
      << "the first evaluation is the best, three more do not improve";
  EXPECT_NE(out_.find("early stop: no improvement in 3 evaluations"), std::string::npos);
}

TEST_F(RunnerTest, EpochsSetTheStepsAndSchedulesCountThem) {
  train_ranks(2,
              {"train={epochs: 2.5, global_batch: 200, log: out/log.jsonl}", "data.order=shuffled",
               "scheduler={type: step, step_size: 1, gamma: 0.1, by: epoch}"});
  const auto lines = log();
  ASSERT_GT(lines.size(), 4u);
  for (const auto& line : lines) {
    const double before = line["epoch"].get<double>() - lines[0]["epoch"].get<double>();
    EXPECT_NEAR(line["lr"].get<double>(), 3e-3 * std::pow(0.1, std::floor(before)), 1e-12) << line;
  }
  EXPECT_NEAR(lines.back()["epoch"].get<double>(), 2.5, 0.2);
}

struct Recorder : RunHook {
  static inline std::mutex mutex;
  static inline std::map<std::string, int> calls;
  int64_t stop_at = 0;
  static void count(const char* what) {
    const std::lock_guard lock(mutex);
    ++calls[what];
  }
  void before_run(RunState&) override { count("before"); }
  void after_step(RunState& state) override {
    count("step");
    state.stop = state.step == stop_at;
  }
  void after_evaluation(RunState& state) override {
    count(state.figures.empty() ? "empty" : "evaluation");
  }
  void after_run(RunState&) override { count("after"); }
};

/// A dataset of two classes that an uneven net separates.
struct Halves : Dataset {
  struct Options {
    int64_t count = 64;
    void read(OptionReader& options) { options.read("count", count, "samples", kAtLeastOne); }
  };
  explicit Halves(const Options& o) : options(o) {}
  int64_t size() const override { return options.count; }
  std::string describe() const override { return "halves"; }
  Batch get(const std::vector<int64_t>& samples) const override {
    const at::Tensor i = torch::tensor(samples, torch::kLong) % size();
    return {torch::stack({i.sin(), i.cos(), i * 0.01}, 1), i.sin().gt(0).to(torch::kLong)};
  }
  std::shared_ptr<const Dataset> validation() const {
    return std::make_shared<Halves>(Options{16});
  }
  Options options;
};

struct OwnNetImpl : torch::nn::Module {
  struct Options {
    int64_t width = 5;
    void read(OptionReader& options) { options.read("width", width, "hidden units", kAtLeastOne); }
  };
  explicit OwnNetImpl(const Options& options)
      : one(register_module("one", torch::nn::Linear(3, options.width))),
        two(register_module("two", torch::nn::Linear(options.width, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return two->forward(one->forward(x).tanh()); }
  torch::nn::Linear one, two;
};
TORCH_MODULE(OwnNet);

TEST_F(RunnerTest, OwnModelDatasetLossAndHook) {
  registry::models().add<OwnNet>("OwnNet");
  registry::datasets().add<Halves>("Halves");
  registry::losses().add("own_loss", [](const at::Tensor& output, const at::Tensor& targets) {
    return torch::nn::functional::cross_entropy(output, targets);
  });
  registry::hooks().add("Recorder", [](OptionReader& options) {
    int64_t stop_at = 0;
    options.read("stop_at", stop_at, "step");
    options.finish();
    return [stop_at] {
      auto hook = std::make_shared<Recorder>();
      hook->stop_at = stop_at;
      return hook;
    };
  });
  EXPECT_THROW(registry::models().add<OwnNet>("OwnNet"), UsageError);
  std::ofstream("c.yaml")
      << "model: {type: OwnNet, width: 7}\ndata: {type: Halves, count: 96}\nloss: {type: "
         "own_loss}\n"
         "optimizer: {type: Adam, lr: 0.05}\nhooks: [{type: Recorder, stop_at: 40}]\n"
         "train: {steps: 60, global_batch: 12, save: own.safetensors, eval_every: 20}\n";
  std::vector<double> losses;
  for (const auto& wrapper : kWrappers) {
    Recorder::calls.clear();
    const auto result = train_ranks(2, {wrapper});
    EXPECT_EQ(result.losses.size(), 40u) << "the hook ended it";
    EXPECT_LT(result.losses.back(), 0.5 * result.losses.front()) << wrapper;
    EXPECT_EQ(Recorder::calls, (std::map<std::string, int>{
                                   {"before", 2}, {"step", 80}, {"evaluation", 4}, {"after", 2}}));
    if (losses.empty()) losses = result.losses;
    expect_near(result.losses, losses, 1e-4);
    EXPECT_EQ(SafetensorsFile("own.safetensors").info("one.weight").shape,
              (std::vector<int64_t>{7, 3}));
  }
  const auto accuracy = train_ranks(2, {"loss.type=cross_entropy", "hooks=[]"});
  EXPECT_GT(accuracy.eval_figures.at("accuracy"), 0.9);
  const auto says = [&](const std::string& change, const std::string& text) {
    try {
      load_config("c.yaml", {change});
      ADD_FAILURE() << change << " was accepted";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  says("model.widht=3", "did you mean \"width\"?");
  says("data.count=0", "data.count: 0; expected a whole number >= 1");
  says("model.type=OwnNett", "did you mean \"OwnNet\"?");
  says("loss.type=own", "own_loss");
  says("hooks.0.type=Recoder", "did you mean \"Recorder\"?");
  EXPECT_THROW(train_ranks(1, {"loss=null"}), UsageError) << "a model without a loss";
}

TEST_F(RunnerTest, ModelsMayCommunicateInTheirConstructors) {
  registry::models().add("Meeting", [](OptionReader& options) {
    ModelPlan plan = model_plan<LineImpl>(options);
    plan.communicates = true;
    plan.make = [make = plan.make](const ModelContext& context) {
      ProcessGroup(context.group).barrier();
      return make(context);
    };
    return plan;
  });
  registry::datasets().add<Halves>("MeetingHalves");
  registry::losses().add("mean", [](const at::Tensor& output, const at::Tensor& /*targets*/) {
    return output.mean();
  });
  std::ofstream("c.yaml")
      << "model: {type: Meeting}\ndata: {type: MeetingHalves}\nloss: {type: cross_entropy}\n"
         "optimizer: {type: SGD}\ntrain: {steps: 0, global_batch: 6}\n";
  EXPECT_NO_THROW(
      train_ranks(3, {"parallel.type=DistributedDataParallel", "data.count=6", "loss.type=mean"}));
}

TEST_F(RunnerTest, AFailureOfTheGroupIsPrintedOnceForAllRanks) {
  registry::models().add<LineImpl>("FailingLine");
  registry::datasets().add<Halves>("FailingHalves");
  registry::losses().add("failing", [](const at::Tensor& output, const at::Tensor&) {
    ProcessGroup().fail("the loss has had enough");
    return output.sum();
  });
  std::ofstream("c.yaml")
      << "model: {type: FailingLine}\ndata: {type: FailingHalves, count: 6}\n"
         "loss: {type: failing}\noptimizer: {type: SGD}\ntrain: {steps: 1, global_batch: 6}\n";
  EXPECT_NE(train({"c.yaml"}), 0);
  EXPECT_EQ(err_, "tessera train: the loss has had enough\n");
}

TEST_F(RunnerTest, ValAndTestStepsPredict) {
  testing::run_ranks(2, [&](ProcessGroup group, int rank) {
    for (const auto& type : kTypes) {
      const auto model = wrapped(type, group);
      const at::Tensor expected =
          torch::linear(batch_of(3).inputs, torch::tensor({{0.5f, -0.25f, 1.0f}}));
      EXPECT_TRUE(at::allclose(model->val_step(batch_of(3)), expected)) << type;
      const at::Tensor output = model->test_step(batch_of(3));
      EXPECT_TRUE(at::allclose(output, expected)) << type;
      EXPECT_FALSE(output.requires_grad());
    }
  });
}

TEST_F(RunnerTest, ValStepsComputeInTheDtypeOfMixedPrecision) {
  testing::run_ranks(2, [&](ProcessGroup group, int rank) {
    for (const std::string full : {"false", "true"}) {
      const auto model = wrapped(
          "{type: FullyShardedDataParallel, mixed_precision: {param_dtype: bfloat16, "
          "full_precision_in_eval: " +
              full + "}}",
          group);
      EXPECT_EQ(model->val_step(batch_of(3)).scalar_type(), at::kBFloat16);
      model->model().module->eval();
      EXPECT_EQ(model->val_step(batch_of(3)).scalar_type(),
                full == "true" ? at::kFloat : at::kBFloat16);
      EXPECT_NO_THROW(model->val_losses(batch_of(3)));
    }
  });
}

}  // namespace
}  // namespace tessera
