#include <gmock/gmock.h>

#include "harness/thrown_by.h"
#include "tessera/memory/deferred_init.h"
#include "train/train_fixture.h"

// model.deferred of the trainer: equal runs, and nothing that is computed at once.

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

class DeferredTraining : public TrainFixture {
 protected:
  /// A run whose larger parameters have 64 KiB and more. Compares it with that of an eager model.
  TrainResult train_both(int world, std::vector<std::string> overrides) {
    overrides.insert(overrides.end(), {"model.n_embd=64", "train.steps=3"});
    auto eager = overrides, deferred = overrides;
    eager.insert(eager.end(), {"model.deferred=false", "train.save=eager.safetensors"});
    deferred.insert(deferred.end(), {"model.deferred=true", "train.save=deferred.safetensors"});
    const auto expected = train_ranks(world, eager);
    const auto before = deferred_stats();
    auto result = train_ranks(world, deferred);
    const auto after = deferred_stats();
    EXPECT_EQ(texts(result.losses), texts(expected.losses));
    EXPECT_EQ(bytes_of("deferred.safetensors"), bytes_of("eager.safetensors"));
    EXPECT_GT(after.deferred, before.deferred);
    EXPECT_EQ(after.computed, before.computed) << "a parameter was used by address";
    replayed_ = after.replayed - before.replayed;
    return result;
  }

  uint64_t replayed_ = 0;
};

TEST_F(DeferredTraining, IsThatOfAnEagerModelForEachWrapper) {
  for (const auto& wrapper : kWrappers) {
    SCOPED_TRACE(wrapper);
    train_both(3, {wrapper});
    EXPECT_GT(replayed_, 0u);
  }
}

TEST_F(DeferredTraining, ReadsInitialWeightsAndComputesNothing) {
  train_ranks(1, {"model.n_embd=64", "model.seed=77", "train.save=init.safetensors"});
  for (const auto& wrapper : kWrappers) {
    SCOPED_TRACE(wrapper);
    train_both(2, {wrapper, "model.init=init.safetensors"});
    EXPECT_EQ(replayed_, 0u) << "random values that the file replaces were computed";
  }
}

TEST_F(DeferredTraining, ResumesFromACheckpointAndComputesNothing) {
  const std::string& fsdp = kWrappers.back();
  train_ranks(2, {fsdp, "model.n_embd=64", "train.steps=2", "checkpoint.folder=c"});
  std::filesystem::copy("c", "d", std::filesystem::copy_options::recursive);
  const std::vector<std::string> rest{fsdp, "model.n_embd=64", "train.steps=4"};
  auto eager = rest, deferred = rest;
  eager.insert(eager.end(), {"model.deferred=false", "checkpoint.folder=c"});
  deferred.insert(deferred.end(), {"checkpoint.folder=d"});  // by default with FSDP
  const auto expected = train_ranks(3, eager);
  const auto before = deferred_stats();
  const auto result = train_ranks(3, deferred);
  EXPECT_EQ(result.first_step, 2);
  EXPECT_EQ(texts(result.losses), texts(expected.losses));
  EXPECT_GT(deferred_stats().deferred, before.deferred) << "FSDP defers by default";
  EXPECT_EQ(deferred_stats().replayed, before.replayed);
  EXPECT_EQ(deferred_stats().computed, before.computed);
}

TEST_F(DeferredTraining, IsRefusedOnAnotherDevice) {
  EXPECT_THAT(thrown_by([&] {
                train_ranks(1, {"model.device=cuda", "model.deferred=true"});
              }),
              HasSubstr("model.deferred"));
}

}  // namespace
}  // namespace tessera::testing
