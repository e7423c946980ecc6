// The trainer on the device: the losses of the CPU.
#include "comm/device/backends.h"
#include "device/loss.h"
#include "device/trainer.h"
#include "tessera/error.h"
#include "train/step/device_copies.h"

namespace tessera::on_device {
namespace {

TEST_P(DeviceTrainingOf, HasTheLossesOfTheCpuAndFewWaits) {
  for (const int world : {1, 2, 3}) {
    if (world > most_ranks()) continue;
    run(world, [&](Trainer& trainer) {
      for (const Options& more : {Options{}, {"train.accumulation=2"}}) {
        const auto options = with({GetParam()}, more);
        const auto waits = std::make_shared<Waits>();
        expect_end_of(trainer.train(true, options, waits), trainer.train(false, options));
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
      const auto options = with({GetParam()}, more);
      const auto waits = std::make_shared<Waits>();
      expect_end_of(trainer.train(true, options, waits), trainer.train(false, options));
      waits->expect_at_most(2, waits->without_operators);
    }
  });
}

TEST_P(DeviceTrainingOf, HasTheLossesOfTheCpuWithoutABackendForTheDevice) {
  run(2, [&](Trainer& trainer) {
    trainer.stage();
    expect_end_of(trainer.train(true, {GetParam()}), trainer.train(false, {GetParam()}));
  });
}

TEST_P(DeviceTrainingOf, EvaluatesToTheFiguresOfTheCpu) {
  for (const int world : {1, 2, 3}) {
    if (world > most_ranks()) continue;
    run(world, [&](Trainer& trainer) {
      for (const Options& more : {Options{}, {"train.ema.decay=0.9"}}) {
        const auto options = with({GetParam(), "train.eval_every=2"}, more);
        const auto there = std::make_shared<Evaluations>(), host = std::make_shared<Evaluations>();
        const auto result = trainer.train(true, options, there);
        const auto expected = trainer.train(false, options, host);
        expect(there->all.size() == 3 && host->all.size() == 3, "three evaluations");
        for (size_t i = 0; i < host->all.size(); ++i)
          expect_evaluation(there->all[i], host->all[i]);
        expect_end_of(result, expected);
        expect_figure("the best loss", *result.best_eval_loss, *expected.best_eval_loss);
      }
    });
  }
}

TEST_P(DeviceTrainingOf, GroupsThatTrainApartHaveTheLossesOfTheCpu) {
  for (const int world : {2, 4}) {
    if (world > most_ranks()) continue;
    run(world, [&](Trainer& trainer) {
      for (const char* more : {", every: 2", ", every: 2, overlap: background, wire: int8"}) {
        const Options options{GetParam(), groups_of(2, more), "train.eval_every=3"};
        expect_end_of(trainer.train(true, options), trainer.train(false, options));
      }
    });
  }
}

std::string name_of(const ::testing::TestParamInfo<std::string>& chosen) {
  const std::vector<std::string> names{
      "ddp", "zero", "zero_shard_gradients", "distributed_optimizer", "fsdp", "fsdp_cpu_offload"};
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
    expect(waits->a_step() <= 2,
           "waits for the loss and the norm, not " + std::to_string(waits->a_step()));
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

/// Keeps the name of the backend of the run's group.
struct UsedBackend : RunHook {
  void after_step(RunState& state) override { name = state.model->group().backend_name(); }
  std::string name;
};

TEST_F(DeviceTraining, RunsMakeTheirGroupMoveTheModelsDevice) {
  run(2, [](Trainer& trainer) {
    trainer.leave_group_to_runs();
    for (const bool with_backend : {false, true}) {
      if (with_backend) comm::add_backend(backend(true));
      for (const auto& wrapper : kWrappers) {
        const auto used = std::make_shared<UsedBackend>();
        expect_end_of(trainer.train(true, {wrapper}, used), trainer.train(false, {wrapper}));
        const bool has_backend = used->name == backend_name();
        expect(has_backend == (name() == "cuda" || with_backend) || devices() < 2, used->name);
      }
    }
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
