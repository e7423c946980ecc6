#include <csignal>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "harness/thrown_by.h"
#include "tessera/module_state_dict.h"
#include "tessera/step/clip_grad.h"
#include "tessera/train/registries.h"
#include "tessera/train/training_session.h"
#include "train/train_fixture.h"

// TrainingSession: a program drives the training with samples of its own, another number of them on
// each rank.

namespace tessera {
namespace {

struct CurveImpl : torch::nn::Module {
  CurveImpl()
      : one(register_module("one", torch::nn::Linear(3, 7))),
        two(register_module("two", torch::nn::Linear(7, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return two(one(x).tanh()); }
  torch::nn::Linear one, two;
};
TORCH_MODULE(Curve);

struct Samples {
  at::Tensor inputs, targets;
};

Samples samples(int64_t first, int64_t count) {
  const at::Tensor i = at::arange(first, first + count, at::kFloat);
  return {at::stack({i.sin(), (i * 0.7).cos(), i.remainder(5) * 0.1}, 1),
          at::stack({(i * 0.3).sin(), i.cos()}, 1)};
}

/// Some ranks have no samples in some steps, and in step 3 a single rank has all.
int64_t count_of(int64_t step, int rank, int world) {
  if (step == 3) return rank == world - 1 ? 6 : 0;
  return (step * 2 + rank * 3) % 5 + (rank == 0 ? 1 : 0);
}

/// This rank's samples of a step; the ranks' samples follow each other.
Samples share_of(int64_t step, int rank, int world) {
  int64_t first = step * 40;
  for (int before = 0; before < rank; ++before) first += count_of(step, before, world);
  return samples(first, count_of(step, rank, world));
}

Samples of_all(int64_t step, int world) {
  int64_t count = 0;
  for (int rank = 0; rank < world; ++rank) count += count_of(step, rank, world);
  return samples(step * 40, count);
}

class Sessions : public testing::TrainFixture {
 protected:
  static constexpr int kSteps = 7;

  void SetUp() override {
    TrainFixture::SetUp();
    static const bool once = [] {
      registry::models().add<Curve>("Curve");
      return true;
    }();
    ASSERT_TRUE(once);
  }

  static Config config_with(const std::vector<std::string>& overrides) {
    return parse_config(
        "model: {type: Curve, seed: 3}\n"
        "loss: {type: mse}\n"
        "optimizer: {type: AdamW, lr: 0.02, weight_decay: 0.1}\n"
        "train: {clip_grad_norm: 0.5, check_replicas: 1}\n",
        overrides);
  }

  static const std::vector<std::string>& wrappers() {
    static const std::vector<std::string> all{
        "parallel.type=DistributedDataParallel",
        "parallel.type=ZeroRedundancyOptimizer",
        "parallel={type: ZeroRedundancyOptimizer, shard_gradients: true}",
        "parallel={type: DistributedOptimizer, reduce_method: mean}",
        "parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}}",
        "parallel={type: FullyShardedDataParallel, overlap: background}"};
    return all;
  }

  /// Plain training with the samples of all ranks: the losses, and the parameters in the end.
  static std::pair<std::vector<double>, std::vector<at::Tensor>> plain(int world, int steps) {
    torch::manual_seed(0);
    Curve net = initial();
    torch::optim::AdamW optimizer(net->parameters(),
                                  torch::optim::AdamWOptions(0.02).weight_decay(0.1));
    std::vector<double> losses;
    for (int step = 0; step < steps; ++step) {
      const auto [inputs, targets] = of_all(step, world);
      optimizer.zero_grad();
      const at::Tensor loss = torch::nn::functional::mse_loss(net(inputs), targets);
      loss.backward();
      torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
      optimizer.step();
      losses.push_back(loss.item<double>());
    }
    return {losses, net->parameters()};
  }

  /// The model of the config as a session makes it.
  static Curve initial() {
    Curve net;
    const TrainingSession session(config_with({"train.log=null"}), ProcessGroup());
    const torch::NoGradGuard no_grad;
    const auto from = session.model().parameters();
    auto to = net->parameters();
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    return net;
  }

  static void expect_thrown(const std::function<void()>& call, const std::string& words,
                            const std::string& begins = "") {
    const std::string text = testing::thrown_by(call);
    EXPECT_NE(text.find(words), std::string::npos) << text << "\nhas not: " << words;
    EXPECT_EQ(text.rfind(begins, 0), 0u) << text;
  }

  void expect_as_plain(int world, const std::vector<std::string>& overrides) {
    const auto [losses, parameters] = plain(world, kSteps);
    testing::run_ranks(world, [&, &losses = losses, &parameters = parameters](
                                  const ProcessGroup& group, int rank) {
      TrainingSession session(config_with(overrides), group);
      for (int step = 0; step < kSteps; ++step) {
        const auto [inputs, targets] = share_of(step, rank, world);
        const SessionStep done = session.step(inputs, targets);
        EXPECT_EQ(done.step, step);
        EXPECT_TRUE(done.updated);
        EXPECT_EQ(done.samples, of_all(step, world).inputs.size(0));
        EXPECT_NEAR(done.loss, losses[step], 2e-6 * (1 + losses[step]))
            << overrides[0] << " world " << world << " step " << step;
      }
      size_t i = 0;
      for (const auto& [name, parameter] : named_parameters(session.model())) {
        const at::Tensor whole = session.wrapper().whole_parameter(name, 0);
        if (rank == 0) {
          EXPECT_TRUE(at::allclose(whole, parameters[i], 1e-4, 1e-6)) << overrides[0] << name;
        }
        ++i;
      }
      const auto [inputs, targets] = of_all(0, world);
      const auto evaluation = session.evaluate(rank == 0 ? inputs : inputs.narrow(0, 0, 0),
                                               rank == 0 ? targets : targets.narrow(0, 0, 0));
      const at::Tensor predicted = session.predict(inputs.narrow(0, 0, rank));
      EXPECT_EQ(predicted.size(0), rank);
      Curve net;
      const torch::NoGradGuard no_grad;
      auto copy = net->parameters();
      for (size_t k = 0; k < copy.size(); ++k) copy[k].copy_(parameters[k]);
      const at::Tensor expected = net(inputs);
      EXPECT_NEAR(evaluation.at("loss"), at::mse_loss(expected, targets).item<double>(), 1e-5);
      if (world > 1) {
        EXPECT_TRUE(at::allclose(predicted, expected.narrow(0, 0, rank), 1e-4, 1e-5));
      }
    });
  }
};

TEST_F(Sessions, EqualPlainTrainingWithUnequalSamples) {
  for (const int world : {1, 2, 3, 4})
    for (const auto& wrapper : wrappers()) expect_as_plain(world, {wrapper});
}

TEST_F(Sessions, AMeanOverSamplesAlsoWithAccumulation) {
  // Micro-batches of unequal sizes: 7 samples in 3 parts.
  const auto losses_of = [&](int world, const std::vector<std::string>& overrides) {
    std::vector<double> losses;
    testing::run_ranks(world, [&](const ProcessGroup& group, int rank) {
      TrainingSession session(config_with(overrides), group);
      for (int step = 0; step < 4; ++step) {
        const int64_t mine = world == 1 ? 14 : rank == 0 ? 7 : rank == 1 ? 4 : 3;
        const auto [inputs, targets] = samples(step * 40 + (rank == 0   ? 0
                                                            : rank == 1 ? 7
                                                                        : 11),
                                               mine);
        const auto done = session.step(inputs, targets);
        if (rank == 0) losses.push_back(done.loss);
      }
    });
    return losses;
  };
  const auto whole = losses_of(1, {"parallel.type=none"});
  for (const auto& wrapper : wrappers()) {
    const auto parts = losses_of(3, {wrapper, "train.accumulation=3"});
    ASSERT_EQ(parts.size(), whole.size());
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(parts[i], whole[i], 2e-6) << wrapper;
  }
}

TEST_F(Sessions, ResumeOnAnotherNumberOfRanks) {
  const auto run = [&](int world, int first, int end, const std::string& wrapper) {
    std::vector<double> losses;
    testing::run_ranks(world, [&](const ProcessGroup& group, int rank) {
      TrainingSession session(config_with({wrapper, "checkpoint.folder=steps",
                                           "scheduler={type: constant, warmup_steps: 5}"}),
                              group);
      EXPECT_EQ(session.steps(), first);
      for (int step = first; step < end; ++step) {
        const auto [inputs, targets] = rank == 0 ? samples(step * 40, 9) : Samples();
        const auto done = session.step(inputs, targets);
        EXPECT_EQ(done.step, step);
        if (rank == 0) losses.push_back(done.loss);
      }
      const std::string path = session.save();
      EXPECT_TRUE(std::filesystem::exists(path)) << path;
    });
    return losses;
  };
  ::testing::internal::CaptureStdout();
  auto whole = run(1, 0, 6, "parallel.type=none");
  for (const auto& wrapper : wrappers()) {
    std::filesystem::remove_all("steps");
    auto losses = run(2, 0, 3, wrapper);
    const auto rest = run(3, 3, 6, wrapper);
    losses.insert(losses.end(), rest.begin(), rest.end());
    ASSERT_EQ(losses.size(), whole.size());
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(losses[i], whole[i], 2e-6) << wrapper;
  }
  ::testing::internal::GetCapturedStdout();
}

TEST_F(Sessions, FinishWritesTheWeightsAndTheLog) {
  ::testing::internal::CaptureStdout();
  testing::run_ranks(2, [&](const ProcessGroup& group, int rank) {
    TrainingSession session(
        config_with({"parallel.type=ZeroRedundancyOptimizer", "train.steps=3",
                     "train.log=out/log.jsonl", "train.save=out/model.safetensors"}),
        group);
    for (int step = 0; step < 3; ++step) {
      const auto [inputs, targets] = samples(step, rank + 1);
      session.step(inputs, targets);
    }
    expect_thrown([&] { session.step(samples(0, 1).inputs); }, "train.steps is 3");
    EXPECT_EQ(session.finish().losses.size(), 3u);
    expect_thrown([&] { session.step(samples(0, 1).inputs); }, "called after finish()");
    expect_thrown([&] { session.finish(); }, "second time");
  });
  ::testing::internal::GetCapturedStdout();
  EXPECT_TRUE(std::filesystem::exists("out/model.safetensors"));
  ASSERT_EQ(log().size(), 3u);
  EXPECT_EQ(log()[2]["step"], 2);
}

TEST_F(Sessions, MetricsAreOverTheSamplesOfAllRanks) {
  for (const int world : {1, 2, 3}) {
    testing::run_ranks(world, [&](const ProcessGroup& group, int rank) {
      TrainingSession session(
          config_with({"parallel.type=FullyShardedDataParallel", "metrics=[mae, r2]"}), group);
      const auto [all, wanted] = samples(0, 6);
      const int64_t first = rank == 0 ? 0 : 4, count = rank == 0   ? (world == 1 ? 6 : 4)
                                                       : rank == 1 ? 2
                                                                   : 0;
      const auto inputs = all.narrow(0, first, count), targets = wanted.narrow(0, first, count);
      const auto figures = session.evaluate(inputs, targets);
      const at::Tensor predicted = session.predict(all), error = predicted - wanted;
      EXPECT_NEAR(figures.at("mae"), error.abs().mean().item<double>(), 1e-6);
      EXPECT_NEAR(figures.at("loss"), error.square().mean().item<double>(), 1e-6);
      EXPECT_EQ(figures.count("r2"), 1u);
    });
  }
}

TEST_F(Sessions, AStepWithoutSamplesAnywhereIsNoStep) {
  testing::run_ranks(2, [&](const ProcessGroup& group, int) {
    TrainingSession session(config_with({"parallel.type=DistributedDataParallel"}), group);
    const auto done = session.step(at::Tensor());
    EXPECT_EQ(done.samples, 0);
    EXPECT_FALSE(done.updated);
    EXPECT_EQ(session.steps(), 0);
    EXPECT_EQ(session.predict(at::empty({0, 3})).size(0), 0);
  });
}

TEST_F(Sessions, AWrongBatchIsAnErrorOnAllRanks) {
  testing::run_ranks(2, [&](const ProcessGroup& group, int rank) {
    TrainingSession session(config_with({"parallel.type=DistributedDataParallel"}), group);
    const auto [inputs, targets] = samples(0, 4);
    expect_thrown([&] { session.step(inputs, rank == 1 ? targets.narrow(0, 0, 3) : targets); },
                  "rank 1: TrainingSession.step: inputs are a tensor of shape [4, 3] and targets a "
                  "tensor of shape [3, 2]; expected the samples of this rank in dimension 0 "
                  "of both");
    EXPECT_TRUE(session.step(inputs, targets).updated);  // the session goes on
  });
}

TEST_F(Sessions, AnErrorOnOneRankIsAnErrorOnAllAtOnce) {
  const auto [inputs, targets] = samples(0, 4);
  const at::Tensor wide = at::ones({4, 7});
  const auto weight_after = [&](const std::string& wrapper, bool throws) {
    at::Tensor weight;
    testing::run_ranks(3, [&](const ProcessGroup& group, int rank) {
      TrainingSession session(config_with({wrapper, "train.ema.decay=0.9"}), group);
      const auto begun = std::chrono::steady_clock::now();
      const auto mine = [&](const at::Tensor& right) { return rank == 1 ? wide : right; };
      const std::string words = "mat1 and mat2 shapes cannot be multiplied (4x7 and 3x7)";
      session.step(inputs, targets);
      if (throws) {
        expect_thrown([&] { session.predict(mine(inputs)); }, words, "rank 1: ");
        expect_thrown([&] { session.evaluate(mine(inputs), targets); }, words, "rank 1: ");
        expect_thrown([&] { session.step(mine(inputs), targets); }, words, "rank 1: ");
      }
      EXPECT_LT(std::chrono::steady_clock::now() - begun, group.timeout() / 2) << wrapper;
      session.step(inputs * 0.5, targets);  // the session goes on
      EXPECT_EQ(session.steps(), 2);
      const at::Tensor whole = session.wrapper().whole_parameter("one.weight", 0);
      if (rank == 0) weight = whole.clone();
    });
    return weight;
  };
  for (const auto& wrapper : wrappers()) {
    if (wrapper.find("leaves") != wrapper.npos) continue;  // forward has collectives
    EXPECT_TRUE(at::equal(weight_after(wrapper, false), weight_after(wrapper, true))) << wrapper;
  }
  // On several hosts, and where forward has collectives, the session may have ended afterwards.
  for (const auto& wrapper : wrappers()) {
    for (const auto& hosts : {std::vector<int>{0, 0}, {0, 1}, {0, 0, 1}}) {
      testing::run_ranks_on(hosts, [&](const ProcessGroup& group, int rank) {
        TrainingSession session(config_with({wrapper}), group);
        const auto begun = std::chrono::steady_clock::now();
        session.step(inputs, targets);
        expect_thrown([&] { session.step(rank == 1 ? wide : inputs, targets); },
                      "mat1 and mat2 shapes", "rank 1: ");
        expect_thrown([&] { session.step(rank == 1 ? wide : inputs, targets); }, "rank");
        EXPECT_LT(std::chrono::steady_clock::now() - begun, group.timeout() / 2) << wrapper;
      });
    }
  }
}

TEST_F(Sessions, AnErrorInAnEvaluationLeavesTheWeights) {
  testing::run_ranks(2, [&](const ProcessGroup& group, int) {
    TrainingSession session(
        config_with({"parallel.type=ZeroRedundancyOptimizer", "train.ema.decay=0.9"}), group);
    const auto [inputs, targets] = samples(0, 4);
    for (int step = 0; step < 3; ++step) session.step(inputs, targets);
    const at::Tensor before = session.model().parameters()[0].detach().clone();
    const at::Tensor wide = at::ones({4, 7});
    EXPECT_THROW(session.predict(wide), std::exception);
    EXPECT_THROW(session.evaluate(wide, targets), std::exception);
    EXPECT_TRUE(at::equal(session.model().parameters()[0], before)) << "the averages stayed";
    EXPECT_TRUE(session.step(inputs, targets).updated);
  });
}

TEST_F(Sessions, AStepThatThrowsLeavesNoGradients) {
  const auto weight_after = [&](int world, const std::string& wrapper, bool throws) {
    at::Tensor weight;
    testing::run_ranks(world, [&](const ProcessGroup& group, int rank) {
      TrainingSession session(
          config_with({wrapper, "loss.type=cross_entropy", "train.accumulation=2"}), group);
      const at::Tensor inputs = samples(0, 8).inputs;
      const at::Tensor targets = at::arange(8, at::kLong).remainder(2);
      at::Tensor wrong = targets.clone();
      wrong[7] = 9;  // no class, in the second micro-batch
      if (throws) EXPECT_THROW(session.step(inputs, wrong), std::exception);
      session.step(inputs * 0.5, targets);
      const at::Tensor whole = session.wrapper().whole_parameter("one.weight", 0);
      if (rank == 0) weight = whole.clone();
    });
    return weight;
  };
  for (const int world : {1, 2})
    for (const auto& wrapper : wrappers())
      EXPECT_TRUE(
          at::equal(weight_after(world, wrapper, false), weight_after(world, wrapper, true)))
          << wrapper << ", world " << world;
}

TEST_F(Sessions, WeightsThatWereSetAfterTheCheckpointOfAStepAreSaved) {
  const at::Tensor mine = at::full({7, 3}, 0.25);
  for (const bool finishes : {false, true}) {
    std::filesystem::remove_all("steps");
    const auto config = config_with(
        {"parallel.type=ZeroRedundancyOptimizer", "checkpoint={folder: steps, every: 1}"});
    ::testing::internal::CaptureStdout();
    testing::run_ranks(2, [&](const ProcessGroup& group, int) {
      TrainingSession session(config, group);
      const auto [inputs, targets] = samples(0, 4);
      session.step(inputs, targets);
      session.set_weight("one.weight", mine);
      if (finishes) session.finish();
      else EXPECT_NE(session.save(), "");
    });
    testing::run_ranks(2, [&](const ProcessGroup& group, int) {
      TrainingSession session(config, group);
      EXPECT_EQ(session.steps(), 1);
      EXPECT_TRUE(at::equal(session.wrapper().whole_parameter("one.weight", group.rank()), mine));
      EXPECT_TRUE(std::filesystem::exists(session.save())) << "also where the step has one";
    });
    ::testing::internal::GetCapturedStdout();
  }
}

TEST_F(Sessions, APartInEvaluationModeStaysInIt) {
  TrainingSession session(config_with({}), ProcessGroup());
  session.model().children()[0]->eval();
  const auto [inputs, targets] = samples(0, 4);
  session.predict(inputs);
  session.evaluate(inputs, targets);
  EXPECT_FALSE(session.model().children()[0]->is_training());
  EXPECT_TRUE(session.model().children()[1]->is_training());
  EXPECT_TRUE(session.model().is_training());
}

TEST_F(Sessions, RefuseWhatNeedsDatasets) {
  const auto refused = [&](const std::vector<std::string>& overrides, const std::string& words) {
    expect_thrown([&] { TrainingSession(config_with(overrides), ProcessGroup()); }, words);
  };
  std::ofstream("text.txt") << std::string(1000, 'x');
  refused({"train.epochs=2"}, "train.epochs: 2, and the program gives the samples; expected");
  refused({"train.eval_every=2"}, "train.eval_every: 2");
  refused({"train.on_nonfinite=rollback", "checkpoint.folder=steps"}, "expected stop or skip");
  refused({"scheduler={type: warmup_cosine}"}, "train.steps: missing");
  refused({"scheduler={type: step, step_size: 2, by: epoch}"}, "have no epochs");
  expect_thrown([&] { run_training(config_with({}), ProcessGroup()); }, "data: missing");
  TrainingSession bounded(config_with({"scheduler={type: warmup_cosine}", "train.steps=4"}),
                          ProcessGroup());
  expect_thrown([&] { bounded.save(); }, "the config has no checkpoint.folder");
}

TEST_F(Sessions, AStopAsksForTheEnd) {
  testing::run_ranks(2, [&](ProcessGroup group, int rank) {
    TrainingSession session(config_with({"parallel.type=DistributedDataParallel"}), group);
    const auto [inputs, targets] = samples(0, 4);
    EXPECT_FALSE(session.step(inputs, targets).stopped);
    group.barrier();
    if (rank == 0) request_stop(SIGTERM);
    group.barrier();
    EXPECT_TRUE(session.step(inputs, targets).stopped);
    expect_thrown([&] { session.step(inputs, targets); }, "a stop was asked for");
  });
  request_stop(0);
}

}  // namespace
}  // namespace tessera
