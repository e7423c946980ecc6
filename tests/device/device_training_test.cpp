// The trainer on the device: the losses of the CPU, and runs that go on where they ended.
#include <algorithm>
#include <filesystem>
#include <optional>

#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>

#include "device/loss.h"
#include "device/seeds.h"
#include "harness/device/device.h"
#include "harness/device/rank_processes.h"
#include "harness/temporary_folder.h"
#include "tessera/error.h"
#include "tessera/train.h"
#include "tessera/train/devices.h"
#include "tessera/train/registries.h"
#include "train/program/group_options.h"
#include "train/run/device_copies.h"

namespace tessera::on_device {
namespace {

using ::testing::Each;
using Options = std::vector<std::string>;

// No optimizer that has kernels of its own on the CPU.
constexpr const char* kConfig = R"(
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
  int64_t size() const override { return 72; }
  std::string describe() const override { return "waves"; }
  Batch get(const std::vector<int64_t>& samples) const override {
    const at::Tensor i = torch::tensor(samples, torch::kLong);
    return {torch::stack({i.sin(), i.cos(), i * 0.01}, 1), i.sin().gt(0).to(torch::kLong)};
  }
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

/// Runs of one rank, in a folder that all ranks share.
class Trainer {
 public:
  Trainer(Groups& groups, const std::string& folder) : groups_(groups) {
    std::filesystem::current_path(folder);
    std::freopen("/dev/null", "w", stdout);  // what runs print
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
    return staged_ ? groups_.staged() : groups_.device();
  }

  Groups& groups_;
  bool staged_ = false;
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
    EXPECT_THAT(errors, Each("")) << world << " ranks, seed " << seed;
  }

  testing::TemporaryFolder folder_;
};

void expect_losses(const std::vector<double>& got, const std::vector<double>& expected,
                   double tolerance = 1e-4) {
  expect(got.size() == expected.size() && !got.empty(), std::to_string(expected.size()) + " steps");
  if (has_kernels_of_cpu()) tolerance = 0;
  for (size_t i = 0; i < got.size(); ++i)
    expect(std::abs(got[i] - expected[i]) <= tolerance * std::abs(expected[i]),
           "the loss of step " + std::to_string(i) + ", " + std::to_string(got[i]) + ", as " +
               std::to_string(expected[i]));
}

const Options kWrappers{"parallel.type=DistributedDataParallel",
                        "parallel.type=ZeroRedundancyOptimizer",
                        "parallel={type: DistributedOptimizer, reduce_method: mean}",
                        "parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}}"};

class DeviceTrainingOf : public DeviceTraining,
                         public ::testing::WithParamInterface<std::string> {};

TEST_P(DeviceTrainingOf, HasTheLossesOfTheCpuAndFewWaits) {
  for (const int world : {1, 2, 3}) {
    if (world > most_ranks()) continue;
    run(world, [&](Trainer& trainer) {
      for (const Options& more : {Options{}, {"train.accumulation=2"}}) {
        Options options{GetParam()};
        options.insert(options.end(), more.begin(), more.end());
        const auto waits = std::make_shared<Waits>();
        const auto there = trainer.train(true, options, waits);
        expect_losses(there.losses, trainer.train(false, options).losses);
        const double most = 2 + (more.empty() ? 0 : 1);  // a loss is read for each micro-batch
        waits->expect_at_most(most, waits->ends);
      }
    });
  }
}

TEST_P(DeviceTrainingOf, TrainsGpt2WithTheLossesOfTheCpuAndFewWaits) {
  folder_.put("text.txt",
              "the quick brown fox jumps over the lazy dog, again and again and again. "
              "the quick brown fox jumps over the lazy dog, again and again and again.");
  folder_.put("c.yaml", R"(
model: {type: GPT2, vocab_size: 256, n_positions: 8, n_embd: 8, n_layer: 2, n_head: 2, dropout: 0}
data: {type: ByteText, path: text.txt, seq_len: 8, order: sequential}
optimizer: {type: RMSprop, lr: 0.001}
train: {steps: 4, global_batch: 4, eval_every: 0}
)");
  run(2, [&](Trainer& trainer) {
    for (const Options& more : {Options{}, {"model.activation_checkpointing=true"}}) {
      Options options{GetParam()};
      options.insert(options.end(), more.begin(), more.end());
      const auto waits = std::make_shared<Waits>();
      const auto there = trainer.train(true, options, waits);
      expect_losses(there.losses, trainer.train(false, options).losses);
      waits->expect_at_most(2, waits->without_operators);
    }
  });
}

TEST_P(DeviceTrainingOf, HasTheLossesOfTheCpuWithoutABackendForTheDevice) {
  run(2, [&](Trainer& trainer) {
    trainer.stage();
    expect_losses(trainer.train(true, {GetParam()}).losses,
                  trainer.train(false, {GetParam()}).losses);
  });
}

TEST_P(DeviceTrainingOf, GoesFromDeviceToCpuAndBackByCheckpoints) {
  run(2, [&](Trainer& trainer) {
    const Options whole{GetParam(), "train.ema.decay=0.9"};
    const auto expected = trainer.train(true, whole).losses;
    auto parts = whole;
    parts.push_back("checkpoint.folder=parts");
    for (const int end : {2, 4, 6}) {
      auto part = parts;
      part.push_back("train.steps=" + std::to_string(end));
      const auto result = trainer.train(end != 4, part);
      expect(result.first_step == end - 2, "the first step of a run to " + std::to_string(end));
      expect_losses(result.losses, {expected.begin() + end - 2, expected.begin() + end});
    }
  });
}

TEST_P(DeviceTrainingOf, RandomNumbersOfTheDeviceGoOn) {
  run(2, [&](Trainer& trainer) {
    const Options whole{GetParam(), "model.dropout=0.2"};
    const auto expected = trainer.train(true, whole).losses;
    for (const int end : {3, 6}) {
      auto part = whole;
      part.insert(part.end(), {"checkpoint.folder=parts", "train.steps=" + std::to_string(end)});
      generator(0).unsafeGetGeneratorImpl()->set_current_seed(end);  // used by nobody
      const auto result = trainer.train(true, part);
      expect_losses(result.losses, {expected.begin() + end - 3, expected.begin() + end});
    }
    expect(expected != trainer.train(true, {GetParam()}).losses, "dropout");
  });
}

std::string name_of(const ::testing::TestParamInfo<std::string>& chosen) {
  const std::vector<std::string> names{"ddp", "zero", "distributed_optimizer", "fsdp"};
  return names.at(chosen.index);
}

INSTANTIATE_TEST_SUITE_P(Wrappers, DeviceTrainingOf, ::testing::ValuesIn(kWrappers), name_of);

TEST_F(DeviceTraining, LossScalingSkipsTheStepsOfTheCpu) {
  run(2, [](Trainer& trainer) {
    for (const auto& wrapper : kWrappers) {
      // The scale is too large for float at first.
      const Options options{wrapper, "train.loss_scale={init_scale: 3e38, growth_interval: 1000}",
                            "loss={type: TenTimes}"};
      const auto there = trainer.train(true, options), host = trainer.train(false, options);
      expect(there.skipped_steps == host.skipped_steps && host.skipped_steps > 0,
             std::to_string(host.skipped_steps) + " skipped steps, not " +
                 std::to_string(there.skipped_steps));
      expect_losses(there.losses, host.losses);
    }
  });
}

TEST_F(DeviceTraining, MixedPrecisionHasTheLossesOfTheCpu) {
  run(2, [](Trainer& trainer) {
    const Options options{
        "parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}, "
        "mixed_precision: {param_dtype: bfloat16, reduce_dtype: float32}}",
        "train.loss_scale=dynamic"};
    const auto waits = std::make_shared<Waits>();
    const auto there = trainer.train(true, options, waits).losses;
    trainer.stage();  // the same kernels, where they are not the CPU's
    expect_losses(there, trainer.train(!has_kernels_of_cpu(), options).losses, 0);
    expect(waits->a_step() <= 3,
           "waits for the loss, the norm and infinities, not " + std::to_string(waits->a_step()));
  });
}

/// Keeps the device of a tensor for which the program names a type of device alone.
struct Unnumbered : RunHook {
  void after_step(RunState&) override {
    places.push_back(torch::empty({1}, at::Device(type())).device());
  }
  std::vector<at::Device> places;
};

TEST_F(DeviceTraining, ARunsDeviceIsTheCurrentOneUntilItEnds) {
  run(2, [](Trainer& trainer) {
    const auto before = torch::empty({1}, at::Device(type())).device();
    const auto hook = std::make_shared<Unnumbered>();
    trainer.train(true, {kWrappers[0]}, hook);
    const std::vector<at::Device> own(6, device(trainer.rank()));
    expect(hook->places == own, "tensors on the run's device");
    expect(torch::empty({1}, at::Device(type())).device() == before, "the device of before");
  });
}

TEST_F(DeviceTraining, PinnedMemoryOfABatchIsFreedOnlyWhenTheDeviceHasReadIt) {
  run(1, [](Trainer&) {
    const auto batch = [](int i) -> Batch {
      const auto whole = torch::full({16, 16}, i);
      return {whole.to(at::kFloat), whole, {{"weights", whole.narrow(1, 0, 8)}}};
    };
    std::vector<Batch> there;
    for (int part = 0; part < 4; ++part) {
      train::DeviceCopies copies;
      keep_busy(50);
      reset_stats();
      for (int i = 0; i < 10; ++i)
        there.push_back(copies.to_device(batch(10 * part + i), device()));
      expect(stats().host_waits == 0, "no wait for copies");
    }
    for (int i = 0; i < 40; ++i) {
      const auto expected = batch(i);
      expect(there[i].inputs.cpu().equal(expected.inputs), "inputs " + std::to_string(i));
      expect(there[i].targets.cpu().equal(expected.targets), "targets " + std::to_string(i));
      expect(there[i].extra.at("weights").cpu().equal(expected.extra.at("weights")), "weights");
    }
  });
}

/// The text of the error of a run.
std::string refusal(Trainer& trainer, const Options& options) {
  try {
    trainer.train(true, options);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST_F(DeviceTraining, AutocastIsRefusedWhereLibtorchHasNone) {
  if (name() != "sim") GTEST_SKIP() << "names the simulated device";
  run(1, [](Trainer& trainer) {
    const auto text = refusal(trainer, {"train.autocast=bfloat16"});
    expect(
        text.find("train.autocast: model.device is sim; expected no autocast") != std::string::npos,
        text);
  });
}

TEST_F(DeviceTraining, GroupsStageTheModelsDeviceIfTheirBackendDoesNotMoveIt) {
  if (name() != "sim") GTEST_SKIP() << "names the simulated device";
  run(1, [](Trainer&) {
    const auto staged = [](const char* device, const char* backend) {
      const Options options{std::string("model.device=") + device,
                            std::string("parallel.backend=") + backend};
      return train::group_options(load_config("c.yaml", options)).staged_device;
    };
    expect(staged("sim:1", "auto") == type() && staged("sim", "gloo") == type(), "sim");
    expect(staged("cpu", "auto") == at::kCPU && staged("sim", "nccl") == at::kCPU, "none");
    expect(staged("cuda", "auto") == at::kCPU, "none where no device is seen");
  });
}

TEST_F(DeviceTraining, DevicesHaveNumbers) {
  if (name() != "sim") GTEST_SKIP() << "names the simulated device";
  run(2, [](Trainer&) {
    expect(device_of("sim", 0) == device(0) && device_of("sim", 4) == device(1), "the local rank");
    expect(device_of("sim:2", 0) == device(2), "the number");
    expect(device_of("cpu", 3) == at::Device(at::kCPU), "the CPU");
    expect(device_problem("sim:1").empty(), "a known name");
    std::string text;
    try {
      device_of("sim:3", 0);
    } catch (const UsageError& error) {
      text = error.what();
    }
    expect(text == "sim:3, and this process sees 3 sim devices; expected at most sim:2", text);
    for (const char* wrong : {"", "sims", "sim:", "sim:x", "sim:1:2", "sim:-1", "sim:128", "cpu:0"})
      expect(!device_problem(wrong).empty(), wrong);
  });
}

}  // namespace
}  // namespace tessera::on_device
