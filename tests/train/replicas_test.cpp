#include "tessera/step/replicas.h"

#include <cmath>

#include <gmock/gmock.h>

#include "harness/thrown_by.h"
#include "tessera/train/registries.h"
#include "train/train_fixture.h"

// Ranks that hold other bits than they should: which tensor, which ranks, and the repair.

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::run_ranks;
using testing::thrown_by;

TEST(Replicas, TheFirstTensorAndTheMinorityAreNamed) {
  run_ranks(4, [](ProcessGroup group, int rank) {
    const auto tensors = [&] {
      return std::vector<std::pair<std::string, at::Tensor>>{
          {"a", at::arange(5, at::kFloat)},
          {"b", at::ones({2, 3}, at::kDouble).t()},
          {"empty", at::empty({0})},
          {"half" + std::to_string(rank % 2), at::full({3}, rank % 2, at::kBFloat16)}};
    };
    const auto sent = [&] { return group.stats().calls(); };
    const auto before = sent();
    EXPECT_EQ(check_replicas(tensors(), group), "");
    EXPECT_EQ(sent() - before, 1U) << "equal replicas take one exchange";

    auto drifted = tensors();
    if (rank == 2) drifted[1].second[1][1] = std::nextafter(1.0, 2.0);
    EXPECT_THAT(thrown_by([&] { check_replicas(drifted, group); }),
                HasSubstr("b on rank 2 is not that of ranks 0, 1, 3; expected the same bits"));
    EXPECT_THAT(check_replicas(drifted, group, true), HasSubstr("b on rank 2"));
    EXPECT_TRUE(at::equal(drifted[1].second, tensors()[1].second));
    EXPECT_EQ(check_replicas(drifted, group), "");

    auto shared = tensors();  // by ranks 1 and 3 alone
    if (rank == 3) shared[3].second[0] = 7;
    if (rank == 0) shared[0].second[0] = -0.0;
    EXPECT_THAT(thrown_by([&] { check_replicas(shared, group); }),
                HasSubstr("a on rank 0 is not that of ranks 1, 2, 3, and 1 other tensors differ"));
    EXPECT_THAT(thrown_by([&] { check_replicas(shared, group, true); }),
                HasSubstr("half1 is not the same on rank 1 and rank 3; expected a majority"));
    EXPECT_EQ(std::signbit(shared[0].second[0].item<float>()), false) << "a was repaired before";
  });
}

/// Changes one rank's model between two steps as a fault of memory does: no version counts it.
/// DistributedOptimizer compares what a program writes.
struct Drift : RunHook {
  int64_t at = 0, rank = 0;
  void after_step(RunState& state) override {
    if (state.step != at || state.model->group().rank() != rank) return;
    float& value = *state.model->replicas().front().second.data_ptr<float>();
    value = std::nextafter(value, 1e9F);
  }
};

/// Changes an option of one rank's optimizer after the first step.
struct OtherBetas : RunHook {
  void after_step(RunState& state) override {
    if (state.step != 1 || state.model->group().rank() != 1) return;
    auto& options = state.model->optimizer().param_groups().front().options();
    set_options(options, {{"betas", std::vector<double>{0.9, 0.96}}});
  }
};

class ReplicasInTraining : public testing::TrainFixture {
 protected:
  void SetUp() override {
    TrainFixture::SetUp();
    static const bool once = [] {
      registry::hooks().add("Drift", [](OptionReader& options) {
        int64_t at = 0, rank = 0;
        options.read("at", at, "steps done");
        options.read("rank", rank, "the rank");
        options.finish();
        return [at, rank]() -> std::shared_ptr<RunHook> {
          auto hook = std::make_shared<Drift>();
          hook->at = at;
          hook->rank = rank;
          return hook;
        };
      });
      registry::hooks().add("OtherBetas", [](OptionReader& options) {
        options.finish();
        return []() -> std::shared_ptr<RunHook> { return std::make_shared<OtherBetas>(); };
      });
      return true;
    }();
    ASSERT_TRUE(once);
  }
};

const std::vector<std::string> kReplicated{
    "parallel={type: DistributedDataParallel}",
    "parallel={type: DistributedOptimizer, reduce_method: mean, bcast_period: -1}",
    "parallel={type: FullyShardedDataParallel, sharding_strategy: no_shard}"};

TEST_F(ReplicasInTraining, DriftOfOneUlpIsNamed) {
  for (const auto& parallel : kReplicated) {
    const std::vector<std::string> options{parallel, "train.check_replicas=3",
                                           "hooks=[{type: Drift, at: 1, rank: 2}]"};
    const std::string text = thrown_by([&] { train_ranks(3, options); });
    EXPECT_THAT(text, HasSubstr("train.check_replicas: after step 2: check_replicas: "))
        << parallel;
    EXPECT_THAT(text, HasSubstr(" on rank 2 is not that of ranks 0, 1")) << parallel;
  }
}

TEST_F(ReplicasInTraining, AnOptionThatDiffersIsNamedAndNotRepaired) {
  for (const auto* repair : {"train.repair_replicas=false", "train.repair_replicas=true"}) {
    const std::string text = thrown_by([&] {
      train_ranks(2, {"parallel={type: DistributedDataParallel}", "train.check_replicas=3", repair,
                      "hooks=[{type: OtherBetas}]"});
    });
    EXPECT_THAT(text, HasSubstr("train.check_replicas: after step 2: "));
    EXPECT_THAT(text, HasSubstr("optimizer, group 0, betas: the ranks differ: [0.9, 0.95] on rank "
                                "0; [0.9, 0.96] on rank 1"));
  }
}

TEST_F(ReplicasInTraining, ARepairedRunGoesOnWithEqualReplicas) {
  for (const auto& parallel : kReplicated) {
    train_ranks(3, {parallel, "train.check_replicas=1", "train.repair_replicas=true",
                    "hooks=[{type: Drift, at: 1, rank: 1}]"});
    EXPECT_THAT(out_, HasSubstr("warning: after step 1: ")) << parallel;
    EXPECT_THAT(out_, HasSubstr(" on rank 1 is not that of ranks 0, 2; repaired")) << parallel;
    EXPECT_EQ(out_.find("warning: after step 2"), std::string::npos) << parallel;
  }
}

TEST_F(ReplicasInTraining, SoundRunsPassWithEveryWrapper) {
  for (const auto& wrapper : testing::kWrappers) {
    for (const int world : {2, 3}) {
      EXPECT_EQ(train_ranks(world, {wrapper, "train.check_replicas=1"}).losses.size(), 6U)
          << wrapper;
    }
  }
  train_ranks(4, {"parallel={type: FullyShardedDataParallel, sharding_strategy: hybrid_shard, "
                  "shard_group_size: 2, wrap_policy: {type: leaves}}",
                  "train.check_replicas=1"});
}

}  // namespace
}  // namespace tessera
