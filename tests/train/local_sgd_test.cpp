#include <csignal>
#include <set>

#include <gmock/gmock.h>

#include "harness/thrown_by.h"
#include "tessera/checkpoint_store.h"
#include "tessera/train/registries.h"
#include "tessera/weights/weights.h"
#include "train/normed.h"
#include "train/train_fixture.h"

// parallel.local_sgd: groups that train apart in a run from a config.

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::kWrappers;
using testing::run_ranks;
using testing::thrown_by;
using Options = std::vector<std::string>;

/// Does something on one rank of the run after a step. The ranks are threads, and the model's group
/// knows their numbers.
struct OnRank : RunHook {
  static int rank_of(const RunState& state) {
    const auto& group = state.model->group();
    return group.world_ranks()[static_cast<size_t>(group.rank())];
  }
};

struct AskedToStop : OnRank {
  void after_step(RunState& state) override {
    if (state.step == 2 && rank_of(state) == 3) request_stop(SIGTERM);
  }
};

/// Writes to a parameter of one rank after the second step.
struct Write : OnRank {
  float value = 0;
  void after_step(RunState& state) override {
    if (state.step != 2 || rank_of(state) != 3) return;
    const torch::NoGradGuard no_grad;
    state.model->replicas().front().second.view({-1})[0] = value;
  }
};
struct WriteNan : Write {
  WriteNan() { value = NAN; }
};

class LocalSgdInTraining : public testing::TrainFixture {
 protected:
  void SetUp() override {
    TrainFixture::SetUp();
    static const bool once = [] {
      registry::models().add<testing::Normed>("Standardized");
      registry::datasets().add<testing::Drifting<48>>("Drifts");
      registry::hooks().add_plan("AskedToStop", [] { return std::make_shared<AskedToStop>(); });
      registry::hooks().add_plan("Write", [] { return std::make_shared<Write>(); });
      registry::hooks().add_plan("WriteNan", [] { return std::make_shared<WriteNan>(); });
      return true;
    }();
    ASSERT_TRUE(once);
  }

  /// The results of all ranks.
  std::vector<TrainResult> train_groups(int world, const Options& overrides,
                                        const std::vector<int>& hosts = {}) {
    const Config config = load_config("c.yaml", overrides);
    std::vector<TrainResult> results(static_cast<size_t>(world));
    ::testing::internal::CaptureStdout();
    try {
      run_ranks(
          world,
          [&](ProcessGroup group, int rank) {
            results[static_cast<size_t>(rank)] = run_training(config, group);
            calls_ = rank == 0 ? group.stats().calls() : calls_;
          },
          {}, hosts);
    } catch (...) {
      out_ = ::testing::internal::GetCapturedStdout();
      throw;
    }
    out_ = ::testing::internal::GetCapturedStdout();
    for (const auto& result : results) EXPECT_EQ(result.eval_loss, results[0].eval_loss);
    return results;
  }

  /// Bytes that rank 0 sent in collectives of these kinds in the last run.
  static double sent(const std::set<std::string>& kinds) {
    uint64_t bytes = 0;
    std::ifstream events("out/log.events.jsonl");
    for (std::string line; std::getline(events, line);) {
      const auto event = nlohmann::json::parse(line);
      if (event["event"] != "end") continue;
      for (const auto& [kind, traffic] : event["communication"].items())
        if (kinds.count(kind) > 0) bytes += traffic["sent"].get<uint64_t>();
    }
    return static_cast<double>(bytes);
  }

  static at::Tensor weights(const std::string& path) {
    const Weights file(path);
    std::vector<at::Tensor> all;
    for (const auto& entry : file.entries())
      all.push_back(file.load(entry.name).to(at::kFloat).reshape({-1}));
    return at::cat(all);
  }

  /// Every safetensors file of two checkpoints has the same bytes.
  static void expect_equal_files(const std::string& a, const std::string& b,
                                 const std::string& where) {
    std::set<std::string> left, right;
    for (const auto& entry : fs::directory_iterator(a)) left.insert(entry.path().filename());
    for (const auto& entry : fs::directory_iterator(b)) right.insert(entry.path().filename());
    ASSERT_EQ(left, right) << where;
    for (const auto& name : left) {
      // Ranks that are threads share a generator.
      if (name.ends_with(".safetensors") && !name.starts_with("rank-"))
        EXPECT_TRUE(bytes_of(a + "/" + name) == bytes_of(b + "/" + name)) << where << ": " << name;
    }
  }

  uint64_t calls_ = 0;  // of the run's group
};

Options with(Options options, const Options& more) {
  options.insert(options.end(), more.begin(), more.end());
  return options;
}

std::string groups_of(int number, const std::string& more = "") {
  return "parallel.local_sgd={groups: " + std::to_string(number) + more + "}";
}

TEST_F(LocalSgdInTraining, EveryStepWithRateOneAndNoMomentumIsTheMeanOfTheGradients) {
  const Options sgd{"optimizer={type: SGD, lr: 0.1}", "train.save_config=false"};
  const auto run = [&](int world, const Options& more) {
    train_groups(world, with(sgd, more));
    return weights("out/model.safetensors");
  };
  for (const int world : {2, 4}) {
    const at::Tensor plain = run(world, {"parallel.type=DistributedDataParallel"});
    for (const char* outer :
         {", every: 1, outer_lr: 1, outer_momentum: 0", ", every: 1, outer: average"}) {
      for (const auto& wrapper : kWrappers) {
        const auto mean = run(world, {wrapper, groups_of(2, outer)});
        EXPECT_LE((mean - plain).abs().max().item<double>(), 1e-5) << wrapper << outer << world;
      }
      const auto alone = run(world, {"parallel.type=none", groups_of(world, outer)});
      EXPECT_LE((alone - plain).abs().max().item<double>(), 1e-5) << outer << world;
      EXPECT_GT((alone - plain).abs().max().item<double>(), 0) << "the order of sums differs";
    }
  }
}

/// kWrappers, and options of ZeroRedundancyOptimizer for which a synchronisation must wait.
std::vector<std::string> wrappers_of_groups() {
  auto all = kWrappers;
  for (const char* more : {"shard_gradients: true, share_parameters: true", "overlap: background"})
    all.push_back(std::string("parallel={type: ZeroRedundancyOptimizer, ") + more + "}");
  return all;
}

TEST_F(LocalSgdInTraining, ShardedGroupsTrainAsPlainOnes) {
  for (const char* more : {", every: 4", ", every: 2, wire: int8, overlap: background"}) {
    const double tolerance = std::string(more).find("int8") == std::string::npos ? 1e-4 : 2e-2;
    const auto plain = train_groups(2, {"parallel.type=none", groups_of(2, more)});
    const double norm = plain[0].eval_loss.value_or(0);
    for (const auto& wrapper : wrappers_of_groups()) {
      const auto sharded = train_groups(4, {wrapper, groups_of(2, more)});
      for (const size_t rank : {0U, 1U, 2U, 3U})
        testing::expect_near(sharded[rank].losses, plain[rank / 2].losses, tolerance);
      EXPECT_NEAR(sharded[0].eval_loss.value_or(9), norm, tolerance * norm) << wrapper;
      EXPECT_NE(sharded[0].losses, sharded[2].losses) << "the groups have data of their own";
    }
  }
}

TEST_F(LocalSgdInTraining, AResumedRunIsBitIdenticalToAnUninterruptedOne) {
  const Options everything{"train.steps=12",           "train.ema.decay=0.9",
                           "data.order=shuffled",      "train.eval_every=4",
                           "train.loss_scale=dynamic", "train.clip_grad_norm=1",
                           "train.save=null",          "train.save_config=false"};
  struct Way {
    Options options;
    std::vector<int> hosts = {};
  };
  std::vector<Way> ways;
  for (const auto& wrapper : wrappers_of_groups())
    ways.push_back({{wrapper, groups_of(2, ", every: 3")}});
  for (const size_t i : {0U, 1U})
    ways.push_back({{kWrappers[i], groups_of(2, ", every: 2, wire: int8, overlap: background")}});
  ways.push_back({{"parallel.type=none", groups_of(4, ", every: 3, outer: average")}});
  ways.push_back({{kWrappers[1], "parallel.local_sgd={every: 3}"}, {0, 1, 0, 1}});
  for (const auto& [way, hosts] : ways) {
    const auto options = with(everything, way);
    const std::string where = way[0] + " " + way[1];
    fs::remove_all("whole");
    fs::remove_all("parts");
    const auto whole = train_groups(4, with(options, {"checkpoint.folder=whole"}), hosts);
    train_groups(4, with(options, {"checkpoint={folder: parts, every: 5}"}), hosts);
    ASSERT_TRUE(fs::exists("parts/step-00000005") || fs::exists("parts/step-00000010")) << where;
    fs::remove_all("parts/step-00000012");
    const auto second = train_groups(4, with(options, {"checkpoint.folder=parts"}), hosts);
    EXPECT_THAT(out_, HasSubstr("local_sgd: ")) << where;
    for (size_t rank = 0; rank < 4; ++rank) {
      ASSERT_EQ(second[rank].first_step, 10) << where;
      EXPECT_EQ(second[rank].losses,
                std::vector<double>(whole[rank].losses.begin() + 10, whole[rank].losses.end()))
          << where << ", rank " << rank;
    }
    EXPECT_EQ(second[0].eval_loss, whole[0].eval_loss) << where;
    expect_equal_files("whole/step-00000012", "parts/step-00000012", where);
  }
}

TEST_F(LocalSgdInTraining, EachGroupKeepsItsBuffers) {
  std::ofstream("c.yaml") << "model: {type: Standardized, seed: 1}\ndata: {type: Drifts, seed: 2}\n"
                             "loss: {type: cross_entropy}\n"
                             "optimizer: {type: SGD, lr: 0.1, momentum: 0.9}\n"
                             "train: {steps: 6, global_batch: 12, eval_every: 6}\n";
  const Options options{kWrappers[0], groups_of(2, ", every: 4")};
  train_groups(4, with(options, {"checkpoint={folder: whole}"}));
  train_groups(4, with(options, {"checkpoint={folder: parts, every: 5}"}));
  fs::remove_all("parts/step-00000006");
  train_groups(4, with(options, {"checkpoint={folder: parts}"}));
  expect_equal_files("whole/step-00000006", "parts/step-00000006", "buffers");
  const Checkpoint checkpoint("whole/step-00000006");
  const auto of_group_1 =
      checkpoint.load_tensor("group-00001-buffers.safetensors", "norm.running_mean");
  EXPECT_FALSE(at::equal(of_group_1, Weights("whole/step-00000006").load("norm.running_mean")));
}

TEST_F(LocalSgdInTraining, GroupsOfAnotherSizeOrNumberGoOn) {
  const Options options{"train.save=null", "train.save_config=false"};
  const auto parameter_of_group_1 = [](const std::string& path) {
    const std::string name = "transformer.wte.weight";
    return Checkpoint(path)
        .load_slices({{name, {256, 16}, 0, 256 * 16, {16, 1}}}, "group-00001")[0]
        .state.tensors.at("parameter");
  };
  train_groups(4, with(options, {kWrappers[3], groups_of(2, ", every: 4"), "train.steps=5",
                                 "train.ema.decay=0.9", "checkpoint={folder: a, every: 3}"}));
  const std::string from = "checkpoint={folder: b, from: a/step-00000003}";
  for (const auto& wrapper : kWrappers) {
    fs::remove_all("b");
    train_groups(2, with(options, {wrapper, groups_of(2, ", every: 4"), "train.steps=3",
                                   "train.ema.decay=0.9", from}));
    EXPECT_TRUE(
        at::equal(parameter_of_group_1("b/step-00000003"), parameter_of_group_1("a/step-00000003")))
        << wrapper;
    EXPECT_EQ(out_.find("anew"), std::string::npos) << out_;
  }
  fs::remove_all("b");
  train_groups(4, with(options, {"parallel.type=none", groups_of(4, ", every: 4"), from}));
  EXPECT_THAT(out_, HasSubstr("is of a run with 2 groups, and this one has 4 groups of 1 rank: "
                              "group i goes on from group i mod 2"));
  fs::remove_all("b");
  train_groups(3, with(options, {kWrappers[1], from}));
  EXPECT_THAT(out_, HasSubstr("is of a run with 2 groups, and this one has 1 group of 3 ranks"));
  train_groups(4, with(options, {kWrappers[1], groups_of(2, ", every: 4"), "train.steps=8",
                                 "checkpoint={folder: c, from: b/step-00000006}"}));
  EXPECT_THAT(out_, HasSubstr("parallel.local_sgd: the outer optimizer starts anew"));
}

TEST_F(LocalSgdInTraining, TheGroupsExchangeOnlyEveryKSteps) {
  // Groups of one rank exchange nothing within them.
  for (const auto& [wire, share] : {std::pair("", 1.0), std::pair(", wire: int8", 0.26)}) {
    const auto run = [&, &wire = wire](int steps) {
      train_groups(2, {"parallel.type=none", groups_of(2, std::string(", every: 5") + wire),
                       "train.steps=" + std::to_string(steps), "train.eval_batches=1"});
      return std::pair(sent({"all_reduce", "all_gather"}), calls_);
    };
    const auto few = run(11), many = run(31);
    const double model = 4 * static_cast<double>(weights("out/model.safetensors").numel());
    // Four synchronisations more; a request to stop is agreed with each.
    EXPECT_EQ(many.second - few.second, 4U) << wire;
    EXPECT_LE(many.first - few.first, 4 * (share * model + 200)) << wire;
    EXPECT_GE(many.first - few.first, 3.9 * share * model) << wire;
  }
}

TEST_F(LocalSgdInTraining, EachValueLeavesAGroupOnce) {
  const auto run = [&](const std::string& wrapper, const std::string& every) {
    train_groups(4, {wrapper, groups_of(2, ", every: " + every)});
    return sent({"all_reduce"});
  };
  for (const auto& wrapper : kWrappers) {
    const double outer = run(wrapper, "1") - run(wrapper, "6");  // five synchronisations
    const double model = 4 * static_cast<double>(weights("out/model.safetensors").numel());
    EXPECT_NEAR(outer, 5 * model / 2, 5 * 0.05 * model) << wrapper;
  }
}

TEST_F(LocalSgdInTraining, ARequestToStopIsAgreedWhereTheGroupsMeet) {
  const Options options{kWrappers[1], groups_of(2, ", every: 4"), "train.steps=10",
                        "train.save=null", "train.save_config=false"};
  const auto whole = train_groups(4, options);
  const auto first =
      train_groups(4, with(options, {"checkpoint.folder=c", "hooks=[{type: AskedToStop}]"}));
  for (const auto& result : first) {
    EXPECT_EQ(result.interrupted_by, SIGTERM);
    EXPECT_EQ(result.losses.size(), 4U);
  }
  const auto rest = train_groups(4, with(options, {"checkpoint.folder=c"}));
  for (size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(rest[rank].losses,
              std::vector<double>(whole[rank].losses.begin() + 4, whole[rank].losses.end()));
  }
}

TEST_F(LocalSgdInTraining, AFaultInOneGroupEndsAllWithItsRank) {
  const Options options{kWrappers[0], groups_of(2, ", every: 20"), "train.steps=30",
                        "train.check_replicas=0"};
  const std::string nan =
      thrown_by([&] { train_groups(4, with(options, {"hooks=[{type: WriteNan}]"})); });
  EXPECT_THAT(nan, HasSubstr("group 1 (ranks 2, 3): "));
  EXPECT_THAT(nan, HasSubstr("train.on_nonfinite: stop: step 2: rank 3, update of step 1: "
                             "parameter transformer."));
  const std::string drift = thrown_by([&] {
    train_groups(4, with(options, {"hooks=[{type: Write}]", "train.check_replicas=1"}));
  });
  EXPECT_THAT(drift, HasSubstr("train.check_replicas: after step 2: check_replicas: transformer."));
  EXPECT_THAT(drift, HasSubstr("group 1 (ranks 2, 3): "));
}

TEST_F(LocalSgdInTraining, WhatCannotWorkIsRefusedWithItsPlace) {
  const auto says = [&](int world, const Options& options, const std::string& text,
                        const std::vector<int>& hosts = {}) {
    EXPECT_THAT(thrown_by([&] { train_groups(world, options, hosts); }), HasSubstr(text));
  };
  const auto& ddp = kWrappers[0];
  const std::string at = "command line: parallel.local_sgd.";
  says(4, {ddp, groups_of(3)}, at + "groups: 3 with 4 ranks; expected a divisor");
  says(4, {ddp, "parallel.local_sgd.groups=0"}, at + "groups: 0; expected host, or a whole number");
  says(4, {ddp, "parallel.local_sgd.groups=rack"}, "expected host, or a whole number >= 1");
  says(4, {ddp, groups_of(2, ", every: -1")}, at + "every: -1; expected");
  says(4, {ddp, groups_of(2, ", outer_lr: 0")}, at + "outer_lr: 0; expected");
  says(4, {ddp, groups_of(2, ", outer_momentum: 1")}, at + "outer_momentum: 1; expected");
  says(4, {ddp, groups_of(2, ", wire: int4")}, at + "wire: int4; expected");
  says(4, {ddp, groups_of(2, ", sync: 3")}, at + "sync: unknown key");
  says(4, {ddp, "parallel.local_sgd={}"}, "host 0 has 3 ranks and host 1 has 1", {0, 0, 0, 1});
  says(4, {"parallel.type=none", groups_of(2)},
       "parallel.type: none with 2 groups of 2 ranks; expected groups of one rank");
  says(2, {ddp, groups_of(2), "train.on_nonfinite=rollback", "checkpoint.folder=c"},
       "train.on_nonfinite: rollback: a rollback is one of all ranks at once, and "
       "parallel.local_sgd has groups");
  says(2, {ddp, groups_of(2), "train.rollback_on_spike=3", "checkpoint.folder=c"},
       "train.rollback_on_spike: ");
  says(3, {ddp, groups_of(3), "data.uneven=join", "train.global_batch=10"}, "data.uneven: join: ");
  // One host is one group, so that a run may shrink to it; no steps apart is no groups.
  EXPECT_EQ(train_groups(2, {ddp, "parallel.local_sgd={every: 2}"})[0].losses.size(), 6U);
  EXPECT_THAT(out_, HasSubstr("local_sgd: 1 group of 2 ranks"));
  const Config off = load_config("c.yaml", {ddp});
  EXPECT_FALSE(off.parallel.local_sgd);
  std::ofstream("full.yaml") << off.dump(true);
  EXPECT_FALSE(load_config("full.yaml").parallel.local_sgd);
}

}  // namespace
}  // namespace tessera
