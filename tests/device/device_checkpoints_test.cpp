// The trainer on the device: runs that go on where they ended.
#include "device/parity.h"
#include "device/trainer.h"
#include "tessera/checkpoint_store.h"

namespace tessera::on_device {
namespace {

TEST_P(DeviceTrainingOf, GoesFromDeviceToCpuAndBackByCheckpoints) {
  const Options average{"train.ema.decay=0.9"};
  for (const Options& more :
       {average,
        {groups_of(2, ", every: 4")},
        with(average, {groups_of(2, ", every: 2, overlap: background, wire: int8")})}) {
    run(2, [&](Trainer& trainer) {
      const auto whole = with({GetParam()}, more);
      const auto expected = trainer.train(true, whole);
      // A part goes on from the middle of the part before it: at its end groups are synchronised.
      std::string from;
      for (const int first : {0, 2, 4}) {
        const auto folder = "part" + std::to_string(first);
        const auto result =
            trainer.train(first != 2, with(whole, {"checkpoint={folder: " + folder +
                                                   ", every: 2, keep_last: 3" + from + "}"}));
        expect(result.first_step == first, "the first step of " + folder);
        expect_end_of(result, expected);
        from = ", from: " + folder + "/step-0000000" + std::to_string(first + 2);
      }
    });
    for (const char* part : {"part0", "part2", "part4"})
      std::filesystem::remove_all(folder_.path(part));
  }
}

/// All tensors of two checkpoints of the same number of ranks, but the states of generators.
void expect_same_tensors(const std::string& path, const std::string& expected_path) {
  const Checkpoint got(path), expected(expected_path);
  int tensors = 0;
  for (const auto& file : expected.files()) {
    if (!file.ends_with(".safetensors") || file.starts_with("rank-")) continue;
    for (const auto& entry : expected.tensors(file).entries()) {
      expect_close(expected.load_tensor(file, entry.name), got.load_tensor(file, entry.name), true,
                   entry.name + " in " + file);
      ++tensors;
    }
  }
  expect(tensors > 0, "tensors in " + expected_path);
}

TEST_P(DeviceTrainingOf, GoesOnInWorldsOfOtherSizesAsTheCpu) {
  // The first run and the last one are on the device.
  for (const std::vector<int>& worlds : {std::vector<int>{2, 3, 1}, {2, 1, 3}}) {
    if (worlds.back() > most_ranks()) continue;
    for (const int part : {0, 1, 2}) {
      run(worlds[static_cast<size_t>(part)], [&](Trainer& trainer) {
        const auto end = std::to_string(2 * part + 2);
        const auto go_on = [&](bool on_device, const std::string& folder) {
          return trainer.train(on_device, {GetParam(), "train.ema.decay=0.9", "train.steps=" + end,
                                           "checkpoint.folder=" + folder});
        };
        const auto there = go_on(part != 1, "there"), host = go_on(false, "host");
        expect(there.first_step == 2 * part, "the first step of the run to " + end);
        expect_end_of(there, host);
        expect_same_tensors(*latest_checkpoint("there"), *latest_checkpoint("host"));
      });
    }
    for (const char* folder : {"there", "host"}) std::filesystem::remove_all(folder_.path(folder));
  }
}

TEST_P(DeviceTrainingOf, RandomNumbersOfTheDeviceGoOn) {
  run(2, [&](Trainer& trainer) {
    const Options whole{GetParam(), "model.dropout=0.2"};
    const auto expected = trainer.train(true, whole).losses;
    for (const int end : {3, 6}) {
      generator(0).unsafeGetGeneratorImpl()->set_current_seed(end);  // used by nobody
      const auto result = trainer.train(
          true, with(whole, {"checkpoint.folder=parts", "train.steps=" + std::to_string(end)}));
      expect_losses(result.losses, {expected.begin() + end - 3, expected.begin() + end});
    }
    expect(expected != trainer.train(true, {GetParam()}).losses, "dropout");
  });
}

}  // namespace
}  // namespace tessera::on_device
