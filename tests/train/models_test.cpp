#include <regex>

#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "harness/thrown_by.h"
#include "tessera/safetensors.h"
#include "tessera/train/registries.h"
#include "tessera/train/training_session.h"
#include "train_fixture.h"

// Several models in one run: section models, and a train step of the program.

namespace tessera {
namespace {

using tessera::testing::thrown_by;
using ::testing::HasSubstr;

/// Layers of uneven sizes.
struct MlpImpl : torch::nn::Module {
  struct Options {
    int64_t in = 3, width = 7, out = 2;
    void read(OptionReader& options) {
      options.read("in", in, "", kAtLeastOne);
      options.read("width", width, "", kAtLeastOne);
      options.read("out", out, "", kAtLeastOne);
    }
  };
  explicit MlpImpl(const Options& options)
      : first(register_module("first", torch::nn::Linear(options.in, options.width))),
        second(register_module("second", torch::nn::Linear(options.width, options.out))) {}
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }

  torch::nn::Linear first, second;
};
TORCH_MODULE(Mlp);

/// Real points, with the noise that the generator makes a point of.
struct Points : Dataset {
  int64_t size() const override { return 40; }
  std::string describe() const override { return "points"; }
  Batch get(const std::vector<int64_t>& samples) const override {
    const auto i = (torch::tensor(samples, torch::kLong) % size()).to(torch::kDouble);
    const auto at = [&](double a) { return torch::sin(i * a); };
    return {torch::stack({at(0.7), at(1.3) + 2}, 1).to(torch::kFloat),
            torch::stack({at(2.1), at(3.7), at(5.3)}, 1).to(torch::kFloat)};
  }
  std::shared_ptr<const Dataset> validation() const { return std::make_shared<Points>(); }
};

at::Tensor bce(const at::Tensor& logits, double label) {
  return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, label));
}

/// Two steps of the critic, the second on its own, then one of the actor, whose loss flows through
/// the critic.
Losses train_pair(StepModels& models, const Batch& batch, bool frozen) {
  StepModel &actor = models["actor"], &critic = models["critic"];
  at::Tensor fake;
  {
    const torch::NoGradGuard no_grad;
    fake = actor.forward(batch.targets);
  }
  critic.backward(bce(critic.forward(batch.inputs), 1));
  critic.backward(bce(critic.forward(fake), 0));
  critic.step();
  const auto second = bce(critic.forward(batch.inputs), 1) + bce(critic.forward(fake), 0);
  critic.update_params(second);
  const auto held = frozen ? critic.freeze() : nullptr;
  const auto loss = bce(critic.forward(actor.forward(batch.targets)), 1);
  actor.update_params(loss);
  return {{"actor_loss", loss}, {"critic_loss", second}};
}

/// One loss of both models.
Losses train_jointly(StepModels& models, const Batch& batch) {
  StepModel &actor = models["actor"], &critic = models["critic"];
  const auto loss =
      bce(critic.forward(actor.forward(batch.targets)), 1) + bce(critic.forward(batch.inputs), 0);
  actor.backward(loss);
  actor.step();
  critic.step();
  return {{"loss", loss}};
}

/// The same as two losses, of which the second gives both models gradients.
Losses train_in_parts(StepModels& models, const Batch& batch) {
  StepModel &actor = models["actor"], &critic = models["critic"];
  const auto own = bce(critic.forward(batch.inputs), 0);
  critic.backward(own);
  const auto joint = bce(critic.forward(actor.forward(batch.targets)), 1);
  actor.backward(joint);
  actor.step();
  critic.step();
  return {{"loss", own + joint}};
}

TrainStep pair_step(bool frozen) {
  TrainStep step;
  step.models = {"actor", "critic"};
  step.train = [frozen](StepModels& models, const Batch& batch) {
    return train_pair(models, batch, frozen);
  };
  step.evaluate = [](StepModels& models, const Batch& batch) {
    return Losses{{"loss", bce(models["critic"].forward(batch.inputs), 1)}};
  };
  step.predict = [](StepModels& models, const Batch& batch) {
    return models["actor"].forward(batch.targets);
  };
  return step;
}

/// What the tests register, once.
void register_components() {
  static const bool once = [] {
    registry::models().add<Mlp>("PairMlp");
    registry::datasets().add<Points>("Points");
    registry::train_steps().add_plan("pair", pair_step(false));
    registry::train_steps().add_plan("frozen_pair", pair_step(true));
    registry::train_steps().add("joint", train_jointly);
    registry::train_steps().add("parts", train_in_parts);
    registry::train_steps().add("odd", [](StepModels& models, const Batch& batch) {
      const int64_t step = models.progress().step;
      auto& actor = models["actor"];
      auto loss = actor.forward(batch.targets).square().mean();
      if (step % 2 == 1) actor.update_params(loss);
      return Losses{{"loss", loss.detach()}};
    });
    registry::train_steps().add("nan", [](StepModels& models, const Batch& batch) {
      auto& actor = models["actor"];
      const bool bad = models.progress().step == 2 && models.group().rank() == 0;
      const auto loss = actor.forward(batch.targets).square().mean() + (bad ? INFINITY : 0.0);
      actor.update_params(loss);
      const auto other = models["critic"].forward(batch.inputs).square().mean();
      models["critic"].update_params(other);
      return Losses{{"loss", other.detach()}};
    });
    registry::train_steps().add("lost", [](StepModels& models, const Batch& batch) {
      const auto loss = models["actor"].forward(batch.targets).mean();
      models["actor"].backward(loss);
      return Losses{{"loss", loss.detach()}};
    });
    registry::train_steps().add("unready", [](StepModels& models, const Batch&) {
      models["actor"].step();
      return Losses{};
    });
    registry::train_steps().add("misspelt", [](StepModels& models, const Batch&) {
      models["acter"].zero_grad();
      return Losses{};
    });
    return true;
  }();
  (void)once;
}

constexpr const char* kPair = R"(
models:
  actor:
    model: {type: PairMlp, in: 3, width: 7, out: 2, seed: 3}
    optimizer: {type: AdamW, lr: 1e-2}
    scheduler: {type: linear, start_factor: 0.5, total_iters: 4}
    train: {clip_grad_norm: 0.05}
  critic:
    model: {type: PairMlp, in: 2, width: 5, out: 1, seed: 4}
    optimizer: {type: SGD, lr: 0.1, momentum: 0.9}
train_step: pair
data: {type: Points, order: sequential}
train: {steps: 6, global_batch: 12, log: out/log.jsonl, save: out/pair.safetensors}
)";

class ModelsTest : public tessera::testing::TrainFixture {
 protected:
  void SetUp() override {
    register_components();
    TrainFixture::SetUp();
    std::ofstream("c.yaml") << kPair;
  }

  /// Weights of both models in the files of train.save.
  static std::map<std::string, at::Tensor> saved(const std::string& stem) {
    std::map<std::string, at::Tensor> all;
    for (const std::string name : {"actor", "critic"}) {
      SafetensorsFile file("out/" + stem + "-" + name + ".safetensors");
      for (const auto& tensor : file.names()) all[name + "." + tensor] = file.load(tensor);
    }
    return all;
  }

  static void expect_equal(const std::map<std::string, at::Tensor>& a,
                           const std::map<std::string, at::Tensor>& b, double tolerance,
                           const std::string& what) {
    ASSERT_EQ(a.size(), b.size()) << what;
    for (const auto& [name, tensor] : a)
      EXPECT_LE((tensor - b.at(name)).abs().max().item<double>(), tolerance)
          << what << ": " << name;
  }
};

struct PlainPair {
  std::map<std::string, at::Tensor> weights;
  std::vector<double> losses;
};

/// The same training as a loop of libtorch over whole batches.
PlainPair plain_pair(int64_t steps, bool joint = false) {
  torch::manual_seed(3);
  Mlp actor(MlpImpl::Options{3, 7, 2});
  torch::manual_seed(4);
  Mlp critic(MlpImpl::Options{2, 5, 1});
  torch::optim::AdamW of_actor(actor->parameters(), torch::optim::AdamWOptions(1e-2));
  torch::optim::SGD of_critic(critic->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const Points points;
  PlainPair result;
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<int64_t> samples;
    for (int64_t i = 0; i < 12; ++i) samples.push_back((step * 12 + i) % points.size());
    const Batch batch = points.get(samples);
    const double factor = 0.5 + 0.5 * static_cast<double>(std::min<int64_t>(step, 4)) / 4;
    for (auto& group : of_actor.param_groups()) group.options().set_lr(1e-2 * factor);
    if (joint) {
      of_actor.zero_grad();
      of_critic.zero_grad();
      const auto loss = bce(critic->forward(actor->forward(batch.targets)), 1) +
                        bce(critic->forward(batch.inputs), 0);
      loss.backward();
      torch::nn::utils::clip_grad_norm_(actor->parameters(), 0.05);
      of_actor.step();
      of_critic.step();
      result.losses.push_back(loss.item<double>());
      continue;
    }
    const auto fake = actor->forward(batch.targets).detach();
    at::Tensor second;
    for (int i = 0; i < 2; ++i) {
      of_critic.zero_grad();
      second = bce(critic->forward(batch.inputs), 1) + bce(critic->forward(fake), 0);
      second.backward();
      of_critic.step();
    }
    of_actor.zero_grad();
    const auto loss = bce(critic->forward(actor->forward(batch.targets)), 1);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(actor->parameters(), 0.05);
    of_actor.step();
    result.losses.push_back((loss + second).item<double>());
  }
  for (const auto& [name, net] : {std::pair("actor.", actor), std::pair("critic.", critic)})
    for (const auto& parameter : net->named_parameters())
      result.weights[name + parameter.key()] = parameter.value().detach();
  return result;
}

TEST_F(ModelsTest, EqualsAPlainLoopInEveryWorldAndWrapper) {
  const PlainPair plain = plain_pair(6);
  for (int world = 1; world <= 4; ++world) {
    for (const auto& wrapper : tessera::testing::kWrappers) {
      for (const std::string step : {"pair", "frozen_pair"}) {
        const std::string what = wrapper + ", " + step + ", " + std::to_string(world) + " ranks";
        const TrainResult result = train_ranks(world, {wrapper, "train_step=" + step});
        tessera::testing::expect_near(result.losses, plain.losses, 1e-5);
        expect_equal(saved("pair"), plain.weights, 2e-6, what);
      }
    }
  }
}

TEST_F(ModelsTest, OneLossTrainsBoth) {
  const PlainPair plain = plain_pair(6, true);
  for (int world = 1; world <= 4; ++world) {
    for (const auto& wrapper : tessera::testing::kWrappers) {
      const std::string what = wrapper + ", " + std::to_string(world) + " ranks";
      const TrainResult result = train_ranks(world, {wrapper, "train_step=joint"});
      tessera::testing::expect_near(result.losses, plain.losses, 1e-5);
      expect_equal(saved("pair"), plain.weights, 2e-6, what);
    }
  }
  std::vector<std::string> scaled{"train_step=joint", "models.actor.train.loss_scale=256"};
  train_ranks(2, scaled);
  expect_equal(saved("pair"), plain.weights, 2e-6, "the loss scale of one");
  scaled.emplace_back("models.critic.train.loss_scale={init_scale: 1024, growth_interval: 2}");
  for (const char* const step : {"joint", "parts"}) {
    scaled.front() = std::string("train_step=") + step;
    train_ranks(2, scaled);
    expect_equal(saved("pair"), plain.weights, 2e-6, std::string("two loss scales, ") + step);
    EXPECT_EQ(log().back().at("critic.loss_scale"), 256) << "the smaller one";
  }
}

TEST_F(ModelsTest, AResumedRunEqualsTheUninterruptedOneAtAnotherNumberOfRanks) {
  for (const auto& wrapper : tessera::testing::kWrappers) {
    std::vector<std::string> run{wrapper, "models.actor.train.ema={decay: 0.5}"};
    const TrainResult whole = train_ranks(2, run);
    const auto expected = saved("pair");
    std::filesystem::remove_all("ck");
    run.push_back("checkpoint={folder: ck, every: 3}");
    auto part = run;
    part.push_back("train.steps=3");
    train_ranks(3, part);
    const TrainResult rest = train_ranks(4, run);
    EXPECT_EQ(rest.first_step, 3) << wrapper;
    tessera::testing::expect_near(rest.losses, {whole.losses.begin() + 3, whole.losses.end()},
                                  1e-5);
    expect_equal(saved("pair"), expected, 2e-6, wrapper);
    EXPECT_NEAR(*rest.eval_loss, *whole.eval_loss, 1e-5) << wrapper;
  }
}

TEST_F(ModelsTest, EachModelHasItsOwnWrapper) {
  const PlainPair plain = plain_pair(6);
  train_ranks(3, {"parallel.type=FullyShardedDataParallel",
                  "models.critic.parallel={type: ZeroRedundancyOptimizer, shard_gradients: true}"});
  expect_equal(saved("pair"), plain.weights, 2e-6, "FSDP and ZeRO");
  EXPECT_THAT(out_, HasSubstr("parallel: actor: FullyShardedDataParallel, "
                              "critic: ZeroRedundancyOptimizer"));
  EXPECT_THAT(out_, HasSubstr("memory of critic:"));
}

TEST_F(ModelsTest, TheLogHasRatesAndNormsByName) {
  train_ranks(1, {});
  const auto lines = log();
  ASSERT_EQ(lines.size(), 6u);
  EXPECT_DOUBLE_EQ(lines[0].at("actor.lr"), 0.005);
  EXPECT_EQ(lines[0].at("lr"), lines[0].at("actor.lr"));
  EXPECT_DOUBLE_EQ(lines[5].at("actor.lr"), 0.01);
  EXPECT_DOUBLE_EQ(lines[5].at("critic.lr"), 0.1);
  EXPECT_GT(lines[5].at("critic.grad_norm"), 0);
  EXPECT_EQ(lines[5].at("grad_norm"), lines[5].at("actor.grad_norm"));
  EXPECT_FLOAT_EQ(lines[5].at("loss").get<float>(),
                  lines[5].at("actor_loss").get<float>() + lines[5].at("critic_loss").get<float>());
  EXPECT_TRUE(lines[5].contains("eval_loss"));
}

TEST_F(ModelsTest, AModelThatIsNotUpdatedHasNoNorm) {
  const TrainResult result = train_ranks(2, {"train_step=odd"});
  EXPECT_EQ(texts(result.grad_norms)[0], "nan");
  EXPECT_GT(result.grad_norms[1], 0);
  EXPECT_EQ(result.skipped_steps, 0);
  EXPECT_TRUE(log()[0].at("critic.grad_norm").is_null());
  EXPECT_FALSE(log()[5].contains("eval_loss")) << "the train step has no evaluate()";
}

TEST_F(ModelsTest, SavedWeightsBeginASingleModel) {
  const TrainResult run = train_ranks(2, {"checkpoint.folder=ck"});
  const auto before = saved("pair");
  const auto expect_actor = [&](const std::vector<std::string>& init) {
    std::vector<std::string> overrides{"train.steps=0", "models.critic.model.seed=9",
                                       "train.save=out/again.safetensors"};
    overrides.insert(overrides.end(), init.begin(), init.end());
    train_ranks(1, overrides);
    const auto after = saved("again");
    for (const auto& [name, tensor] : before)
      EXPECT_EQ(tensor.equal(after.at(name)), name.rfind("actor.", 0) == 0) << name;
  };
  expect_actor({"models.actor.model.init=out/pair-actor.safetensors"});
  expect_actor({"models.actor.model.init=" + run.checkpoint, "models.actor.model.strict=false",
                "models.actor.model.key_map=[{pattern: '^actor\\.', replacement: ''}]"});
}

TEST_F(ModelsTest, AFrozenModelSendsNoGradients) {
  const auto sent = [&](const std::string& step) {
    uint64_t bytes = 0;
    const Config config =
        load_config("c.yaml", {"parallel.type=DistributedDataParallel", "train_step=" + step});
    tessera::testing::run_ranks(2, [&](ProcessGroup group, int rank) {
      run_training(config, group);
      if (rank == 0) bytes = group.stats().all_reduce.bytes_sent;
    });
    return bytes;
  };
  constexpr uint64_t kOfCritic = (2 * 5 + 5 + 5 + 1) * sizeof(float), kSteps = 6;
  EXPECT_EQ(sent("pair") - sent("frozen_pair"), kOfCritic * kSteps);
}

TEST_F(ModelsTest, AnAverageOfOneModelIsSavedForItAlone) {
  train_ranks(2, {});
  const auto plain = saved("pair");
  train_ranks(2, {"models.actor.train.ema={decay: 0.9}", "train.save=out/averaged.safetensors"});
  const auto averaged = saved("averaged");
  for (const auto& [name, tensor] : plain)
    EXPECT_EQ(tensor.equal(averaged.at(name)), name.rfind("critic.", 0) == 0) << name;
}

TEST_F(ModelsTest, AnUpdateWithALossThatIsNotFiniteIsLeftOutOnAllRanks) {
  for (const auto& wrapper : tessera::testing::kWrappers) {
    const TrainResult skipped =
        train_ranks(2, {wrapper, "train_step=nan", "train.on_nonfinite=skip"});
    EXPECT_EQ(skipped.skipped_steps, 1) << wrapper;
    EXPECT_THAT(out_, HasSubstr("step 2: backward of actor: the norm of the gradient is nan"));
    EXPECT_TRUE(log()[2].at("actor.grad_norm").is_null());
    EXPECT_GT(log()[2].at("critic.grad_norm"), 0) << "its update took place";
    EXPECT_GT(log()[3].at("actor.grad_norm"), 0);
    const auto error = thrown_by([&] { train_ranks(2, {wrapper, "train_step=nan"}); });
    EXPECT_THAT(error, HasSubstr("train.on_nonfinite: stop: step 2: backward of actor"));
  }
}

TEST_F(ModelsTest, AHookGetsTheModelsByName) {
  struct Names : RunHook {
    void after_step(RunState& state) override {
      for (const auto& [name, wrapper] : state.models)
        seen += name + " " + std::to_string(wrapper->shards().size()) + " ";
      seen += std::to_string(state.model->shards().size()) + "; ";
    }
    std::string state() const override { return seen; }
    std::string seen;
  };
  const auto names = std::make_shared<Names>();
  Config config = load_config("c.yaml", {"train.steps=1"});
  config.hooks.push_back([names] { return names; });
  tessera::testing::run_ranks(1, [&](ProcessGroup group, int) { run_training(config, group); });
  EXPECT_EQ(names->seen, "actor 4 critic 4 8; ");
}

TEST_F(ModelsTest, ASessionTrainsThem) {
  const PlainPair plain = plain_pair(6);
  std::string text = kPair;
  text = text.substr(0, text.find("data:")) + "train: {save: out/pair.safetensors}";
  const Config config = parse_config(text, {"parallel.type=ZeroRedundancyOptimizer"});
  tessera::testing::run_ranks(2, [&](ProcessGroup group, int rank) {
    TrainingSession session(config, group);
    const Points points;
    for (int64_t step = 0; step < 6; ++step) {
      std::vector<int64_t> samples;  // 5 on rank 0, 7 on rank 1
      for (int64_t i = rank * 5; i < 5 + rank * 7; ++i)
        samples.push_back((step * 12 + i) % points.size());
      const Batch batch = points.get(samples);
      const SessionStep done = session.step(batch.inputs, batch.targets);
      EXPECT_NEAR(done.loss, plain.losses[static_cast<size_t>(step)], 1e-5);
    }
    session.finish();
  });
  expect_equal(saved("pair"), plain.weights, 2e-6, "session");
}

TEST_F(ModelsTest, WrongConfigsAreRefusedAtTheStart) {
  const auto wrong = [](const std::vector<std::string>& overrides, const std::string& text) {
    EXPECT_THAT(thrown_by([&] { load_config("c.yaml", overrides); }), HasSubstr(text));
  };
  wrong({"train_step=pear"}, "command line: train_step.type: pear; expected one of frozen_pair, ");
  wrong({"train_step=null"}, "train_step: missing; expected the name of a train step");
  wrong({"models.acter={model: {type: PairMlp}}"},
        "models.acter: no model of this train_step; did you mean \"actor\"?");
  wrong({"models.critic=null"}, "models.critic.model: missing");
  wrong({"model={type: PairMlp}"},
        "command line: model: models is given, too; expected models.NAME.model");
  wrong({"optimizer.type=SGD"}, "optimizer: models is given, too; expected models.NAME.optimizer");
  wrong({"scheduler.type=none"}, "scheduler: models is given, too");
  wrong({"loss=mse"}, "loss: models is given, too, and its train_step computes the losses");
  wrong({"train.clip_grad_norm=1"},
        "train.clip_grad_norm: belongs to each of models; expected "
        "models.NAME.train.clip_grad_norm");
  wrong({"train.ema.decay=0.5"}, "train.ema: belongs to each of models");
  wrong({"train.accumulation=2"}, "train.accumulation: a train_step of models divides its batch");
  wrong({"data.uneven=join"}, "data.uneven: join: a train_step of models cannot");
  wrong({"models.actor.parallel.backend=tcp"},
        "models.actor.parallel.backend: belongs to the run; expected parallel.backend");
  wrong({"models.actor.optimiser={}"}, "models.actor.optimiser: unknown key; did you mean");
  wrong({"models.actor.optimizer.lr=-1"}, "models.actor.optimizer.lr: ");
  wrong({"models.actor.optimizer.type=ZeroRedundancyOptimizer"},
        "models.actor.optimizer.type: ZeroRedundancyOptimizer wraps an optimizer");
  wrong({"models.actor.train.steps=3"}, "models.actor.train.steps: unknown key");
  wrong(
      {"models.actor.model.device=cuda"},
      "models.critic.model.device: cpu, and models.actor.model.device is cuda; expected the same");
  wrong({"train_step=odd", "train.eval_every=2"},
        "train.eval_every: there are no evaluations, because the train_step has no evaluate()");
  wrong({"train_step=odd", "metrics=[mae]"}, "metrics: there are no evaluations");
  wrong({"models={}"}, "models: empty; expected a map of models by name");
  wrong({"models.a b={}", "train_step=odd"}, "\"a b\" as the name of a model; expected letters");
  EXPECT_TRUE(load_config("c.yaml", {"models=null", "train_step=null", "model={type: PairMlp}",
                                     "optimizer={type: SGD, lr: 1}", "loss=mse"})
                  .models.empty());
  std::ofstream("one.yaml") << "model: {type: PairMlp}\noptimizer: {type: SGD, lr: 1}\n"
                               "loss: mse\ntrain_step: pair\n";
  EXPECT_THAT(thrown_by([] { load_config("one.yaml"); }),
              HasSubstr("one.yaml:4: train_step: trains several models; expected models"));
}

TEST_F(ModelsTest, WrongTrainStepsAreNamed) {
  const auto wrong = [&](const std::string& step, const std::string& text) {
    EXPECT_THAT(thrown_by([&] { train_ranks(1, {"train_step=" + step}); }), HasSubstr(text));
  };
  wrong("lost", "train_step: actor has gradients that no step() has used");
  wrong("unready", "train_step: actor.step(): there are no gradients");
  wrong("misspelt", "train_step: no model \"acter\"; did you mean \"actor\"?");
}

TEST_F(ModelsTest, ACheckpointOfOtherNamesIsRefused) {
  train_ranks(1, {"train_step=odd", "checkpoint.folder=ck", "train.steps=2"});
  std::ofstream("c.yaml") << std::regex_replace(std::string(kPair), std::regex("critic"), "judge");
  EXPECT_THAT(thrown_by([&] {
                train_ranks(1, {"train_step=odd", "checkpoint.folder=ck", "train.steps=4"});
              }),
              HasSubstr("judge.first.weight"));
}

TEST_F(ModelsTest, TheDumpOfAConfigLoadsAsTheSame) {
  const Config config = load_config("c.yaml", {"parallel.type=ZeroRedundancyOptimizer"});
  const std::string full = config.dump(true);
  EXPECT_EQ(parse_config(full).dump(true), full);
  EXPECT_EQ(config.models[0].at("optimizer.lr"), "c.yaml:5: models.actor.optimizer.lr: ");
  EXPECT_EQ(config.models[1].parallel.type, "ZeroRedundancyOptimizer");
}

}  // namespace
}  // namespace tessera
