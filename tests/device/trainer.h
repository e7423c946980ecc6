#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "device/seeds.h"
#include "harness/device/device.h"
#include "harness/device/rank_processes.h"
#include "harness/temporary_folder.h"
#include "tessera/train.h"
#include "tessera/train/devices.h"
#include "tessera/train/registries.h"

// Runs of the trainer on a device and on the CPU.

namespace tessera::on_device {

using Options = std::vector<std::string>;

// No optimizer that has kernels of its own on the CPU.
inline constexpr const char* kConfig = R"(
model: {type: Small, seed: 1}
data: {type: Waves, order: sequential}
loss: {type: cross_entropy}
optimizer: {type: RMSprop, lr: 0.01, momentum: 0.9}
train: {steps: 6, global_batch: 12, eval_every: 0}
)";

struct SmallImpl : torch::nn::Module {
  struct Options {
    double dropout = 0;
    void read(OptionReader& options) { options.read("dropout", dropout, "probability"); }
  };
  explicit SmallImpl(Options options)
      : one(register_module("one", torch::nn::Linear(3, 5))),
        two(register_module("two", torch::nn::Linear(5, 7))),
        three(register_module("three", torch::nn::Linear(7, 2))),
        drop(register_module("drop", torch::nn::Dropout(options.dropout))) {}
  at::Tensor forward(const at::Tensor& x) { return three(two(drop(one(x).tanh())).tanh()); }
  torch::nn::Linear one, two, three;
  torch::nn::Dropout drop;
};
TORCH_MODULE(Small);

struct Waves : Dataset {
  explicit Waves(int64_t samples = 72) : samples_(samples) {}
  /// No whole number of chunks of an evaluation.
  std::shared_ptr<const Dataset> validation() const { return std::make_shared<Waves>(20); }
  int64_t size() const override { return samples_; }
  std::string describe() const override { return "waves"; }
  Batch get(const std::vector<int64_t>& samples) const override {
    const at::Tensor i = torch::tensor(samples, torch::kLong);
    return {torch::stack({i.sin(), i.cos(), i * 0.01}, 1), i.sin().gt(0).to(torch::kLong)};
  }

 private:
  int64_t samples_;
};

/// Keeps how often the host has waited at the end of each step.
struct Waits : RunHook {
  void after_step(RunState&) override {
    reasons = stats().wait_reasons;
    const auto is_operator = [](const auto& reason) { return reason.starts_with("aten::"); };
    ends.push_back(stats().host_waits);
    without_operators.push_back(ends.back() -
                                std::count_if(reasons.begin(), reasons.end(), is_operator));
    if (ends.size() == 1) reset_stats();
  }
  /// Of a step, without the first one, which allocates, and the last one, after which the run
  /// evaluates.
  double a_step() const { return a_step(ends); }
  static double a_step(const std::vector<uint64_t>& counts) {
    return static_cast<double>(counts.at(counts.size() - 2)) /
           static_cast<double>(counts.size() - 2);
  }
  /// `counts`: ends or without_operators.
  void expect_at_most(double most, const std::vector<uint64_t>& counts) const {
    std::string text;
    for (const auto& reason : reasons) text += " " + reason;
    expect(a_step(counts) <= most, "at most " + std::to_string(most) + " waits, not " +
                                       std::to_string(a_step(counts)) + ":" + text);
  }
  std::vector<uint64_t> ends;
  std::vector<uint64_t> without_operators;  // for whose results the simulated device must wait
  std::multiset<std::string> reasons;
};

/// Keeps the figures of each evaluation.
struct Evaluations : RunHook {
  using Figures = std::map<std::string, double>;
  void after_evaluation(RunState& state) override {
    all.emplace_back(state.figures.begin(), state.figures.end());
  }
  std::vector<Figures> all;
};

/// Runs of one rank, in a folder that all ranks share.
class Trainer {
 public:
  Trainer(Groups& groups, const std::string& folder) : groups_(groups) {
    std::filesystem::current_path(folder);
    if (!std::freopen("/dev/null", "w", stdout)) throw std::runtime_error("/dev/null");
    registry::models().add<Small>("Small");
    registry::datasets().add<Waves>("Waves");
    registry::losses().add("TenTimes", [](const at::Tensor& output, const at::Tensor& targets) {
      return torch::cross_entropy_loss(output, targets) * 10;
    });
    if (name() == "sim") {
      registry::add_device(name(),
                           {type(), [](at::Device device) { return generator(device.index()); }});
    }
  }

  int rank() const { return groups_.rank(); }
  /// Runs use no backend for the device from now on.
  void stage() { staged_ = true; }
  /// Runs get a group for CPU tensors from now on.
  void leave_group_to_runs() { left_to_runs_ = true; }
  TrainResult train(bool on_device, Options options,
                    std::shared_ptr<RunHook> hook = std::make_shared<Waits>()) {
    options.insert(options.begin(), on_device ? "model.device=" + name() : "model.device=cpu");
    Config config = load_config("c.yaml", options);
    config.hooks.push_back([hook] { return hook; });
    return run_training(config, on_device ? group_on_device() : groups_.cpu());
  }

 private:
  /// The run itself makes the device the current one.
  ProcessGroup group_on_device() {
    const c10::DeviceGuard own(device(groups_.rank()));
    if (left_to_runs_) return groups_.cpu();
    return staged_ ? groups_.staged() : groups_.device();
  }

  Groups& groups_;
  bool staged_ = false, left_to_runs_ = false;
};

class DeviceTraining : public ::testing::Test {
 protected:
  DeviceTraining() { folder_.put("c.yaml", kConfig); }
  void run(int world, const std::function<void(Trainer&)>& body) {
    const auto seed = seeds(1).front();
    const auto errors = run_processes(world, seed, [&](Groups& groups) {
      Trainer trainer(groups, folder_.path());
      body(trainer);
    });
    EXPECT_THAT(errors, ::testing::Each("")) << world << " ranks, seed " << seed;
  }

  testing::TemporaryFolder folder_;
};

inline Options with(Options options, const Options& more) {
  options.insert(options.end(), more.begin(), more.end());
  return options;
}

/// Exactly, where the kernels are those of the CPU.
inline void expect_figure(const std::string& what, double got, double expected,
                          double tolerance = 1e-4) {
  if (has_kernels_of_cpu()) tolerance = 0;
  expect(std::abs(got - expected) <= tolerance * std::abs(expected),
         what + ", " + std::to_string(got) + ", as " + std::to_string(expected));
}

inline void expect_losses(const std::vector<double>& got, const std::vector<double>& expected,
                          double tolerance = 1e-4) {
  expect(got.size() == expected.size() && !got.empty(), std::to_string(expected.size()) + " steps");
  for (size_t i = 0; i < got.size(); ++i)
    expect_figure("the loss of step " + std::to_string(i), got[i], expected[i], tolerance);
}

inline void expect_evaluation(const std::map<std::string, double>& got,
                              const std::map<std::string, double>& expected,
                              double tolerance = 1e-4) {
  expect(got.size() == expected.size() && got.count("loss") == 1, "the figures of an evaluation");
  for (const auto& [figure, value] : got)
    expect_figure("the evaluation's " + figure, value, expected.at(figure), tolerance);
}

/// The losses from the first step of `got` on, and the evaluation at the end of `expected`.
inline void expect_end_of(const TrainResult& got, const TrainResult& expected) {
  expect_losses(got.losses, {expected.losses.end() - static_cast<int64_t>(got.losses.size()),
                             expected.losses.end()});
  expect_evaluation(got.eval_figures, expected.eval_figures);
}

inline const std::string kFsdp =
    "parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}";
inline const Options kWrappers{"parallel.type=DistributedDataParallel",
                               "parallel.type=ZeroRedundancyOptimizer",
                               "parallel={type: ZeroRedundancyOptimizer, shard_gradients: true, "
                               "bucket_cap_mb: 1e-4}",
                               "parallel={type: DistributedOptimizer, reduce_method: mean}",
                               kFsdp + "}",
                               kFsdp + ", cpu_offload: true}"};

inline std::string groups_of(int number, const std::string& more) {
  return "parallel.local_sgd={groups: " + std::to_string(number) + more + "}";
}

class DeviceTrainingOf : public DeviceTraining,
                         public ::testing::WithParamInterface<std::string> {};

}  // namespace tessera::on_device
