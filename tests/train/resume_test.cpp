#include <csignal>
#include <cstdlib>
#include <set>

#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "faults/failing_files.h"
#include "harness/thrown_by.h"
#include "tessera/checkpoint_store.h"
#include "tessera/error.h"
#include "tessera/safetensors.h"
#include "tessera/safetensors_weights.h"
#include "tessera/train/registries.h"
#include "tessera/weights/weights.h"
#include "train/train_fixture.h"

// Checkpoints of runs: what goes on is what would have gone on.

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::thrown_by;

class ResumeTest : public testing::TrainFixture {
 protected:
  /// Two optimizer states, and weights, that must be equal bit by bit.
  static void expect_equal_state(const std::string& a, const std::string& b) {
    const Checkpoint left(a), right(b);
    const Weights left_weights(a), right_weights(b);
    std::vector<std::string> names;
    for (const auto& entry : left_weights.entries()) names.push_back(entry.name);
    ASSERT_EQ(names.size(), right_weights.entries().size());
    std::vector<ElementRange> requests;
    for (const auto& name : names) {
      const at::Tensor mine = left_weights.load(name);
      EXPECT_TRUE(at::equal(mine, right_weights.load(name))) << name;
      requests.push_back({name, mine.sizes().vec(), 0, mine.numel(), memory_strides(mine)});
    }
    const auto mine = left.load_slices(requests), theirs = right.load_slices(requests);
    for (size_t i = 0; i < mine.size(); ++i) {
      ASSERT_FALSE(mine[i].stateless()) << names[i];
      ASSERT_EQ(mine[i].state.tensors.size(), theirs[i].state.tensors.size()) << names[i];
      EXPECT_EQ(mine[i].state.scalars, theirs[i].state.scalars) << names[i];
      for (const auto& [key, tensor] : mine[i].state.tensors)
        EXPECT_TRUE(at::equal(tensor, theirs[i].state.tensors.at(key))) << names[i] << " " << key;
    }
  }

  static std::vector<std::string> joined(std::vector<std::string> a,
                                         const std::vector<std::string>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }
};

const std::vector<std::string> kWays{
    "parallel.type=DistributedDataParallel",
    "parallel.type=ZeroRedundancyOptimizer",
    "parallel={type: ZeroRedundancyOptimizer, partition: first_fit}",
    "parallel={type: ZeroRedundancyOptimizer, shard_gradients: true, share_parameters: true}",
    "parallel={type: DistributedOptimizer, reduce_method: mean}",
    "parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}}"};

/// Loads copies of the optimizer's state after the second step, as a resumed run does.
struct TakesStateSlices : RunHook {
  void after_step(RunState& state) override {
    if (state.step != 2) return;
    auto slices = state.model->state_slices();
    for (auto& slice : slices)
      for (auto& [name, tensor] : slice.state.tensors) tensor = tensor.clone();
    state.model->load_state_slices(std::move(slices));
    for (const auto& slice : slices)
      for (const auto& [name, tensor] : slice.state.tensors)
        EXPECT_FALSE(tensor.defined()) << name << " of " << slice.parameter << " is kept";
  }
};

TEST_F(ResumeTest, StateThatWasReadIsDroppedByEveryWrapper) {
  registry::hooks().add("TakesStateSlices", [](OptionReader& options) {
    options.finish();
    return []() -> std::shared_ptr<RunHook> { return std::make_shared<TakesStateSlices>(); };
  });
  for (const auto& wrapper : kWays) {
    const auto losses = train_ranks(2, {wrapper}).losses;
    EXPECT_EQ(train_ranks(2, {wrapper, "hooks=[{type: TakesStateSlices}]"}).losses, losses)
        << wrapper;
  }
}

TEST_F(ResumeTest, AResumedRunIsBitIdenticalToAnUninterruptedOne) {
  const std::vector<std::string> everything{
      "train.steps=12",         "train.ema.decay=0.9",
      "model.dropout=0.1",      "data.order=shuffled",
      "train.eval_every=4",     "train.loss_scale=dynamic",
      "train.clip_grad_norm=1", "scheduler={type: warmup_cosine, warmup_steps: 4}"};
  for (const auto& wrapper : kWays) {
    // Ranks that are threads share one generator, and draw from it in any order: dropout is for
    // worlds of one here.
    for (const int world : {1, 2, 3}) {
      auto options = joined(everything, {wrapper});
      if (world > 1) options.push_back("model.dropout=0");
      fs::remove_all("whole");
      fs::remove_all("parts");
      const auto whole = train_ranks(world, joined(options, {"checkpoint.folder=whole"}));
      const auto first = train_ranks(world, joined(options, {"checkpoint={folder: parts, every: 5}",
                                                             "hooks=[]", "train.log=parts.jsonl"}));
      ASSERT_EQ(first.losses, whole.losses) << "saving changes nothing";
      fs::remove_all("parts/step-00000012");
      const auto second =
          train_ranks(world, joined(options, {"checkpoint.folder=parts", "train.log=parts.jsonl"}));
      EXPECT_EQ(second.first_step, 10) << wrapper;
      EXPECT_EQ(second.losses, std::vector<double>(whole.losses.begin() + 10, whole.losses.end()))
          << wrapper << world;
      EXPECT_EQ(second.grad_norms,
                std::vector<double>(whole.grad_norms.begin() + 10, whole.grad_norms.end()));
      EXPECT_EQ(second.eval_loss, whole.eval_loss) << wrapper << world;
      expect_equal_state("whole/step-00000012", "parts/step-00000012");
      std::ifstream lines("parts.jsonl");
      int64_t count = 0;
      for (std::string line; std::getline(lines, line); ++count)
        EXPECT_EQ(nlohmann::json::parse(line)["step"], count);
      EXPECT_EQ(count, 12) << "the log has every step once";
    }
  }
}

TEST_F(ResumeTest, StateResumesInAnyWorldSizeAndWrapper) {
  for (const auto& from : kWays) {
    fs::remove_all("a");
    train_ranks(4, {from, "checkpoint.folder=a", "train.ema.decay=0.9"});
    for (const auto& to : kWays) {
      for (const int world : {1, 2, 3}) {
        if (world == 1 && to != kWays[1]) continue;
        fs::remove_all("b");
        // No further step: what is written is what was read.
        train_ranks(world, {to, "checkpoint={folder: b, from: a/step-00000006}",
                            "train.ema.decay=0.9", "train.save=null", "train.save_config=false"});
        ASSERT_TRUE(fs::exists("b/step-00000006")) << to;
        expect_equal_state("a/step-00000006", "b/step-00000006");
      }
    }
  }
}

bool stored_by_columns = false;

/// Two layers whose weights are stored by rows or by columns.
struct StoredImpl : torch::nn::Module {
  StoredImpl()
      : one(register_module("one", torch::nn::Linear(3, 5))),
        two(register_module("two", torch::nn::Linear(5, 2))) {
    for (const auto& layer : {one, two})
      if (stored_by_columns) layer->weight.set_data(layer->weight.detach().t().contiguous().t());
  }
  at::Tensor forward(const at::Tensor& x) { return two(one(x).tanh()); }
  torch::nn::Linear one, two;
};
TORCH_MODULE(Stored);

struct Waves : Dataset {
  int64_t size() const override { return 64; }
  std::string describe() const override { return "waves"; }
  Batch get(const std::vector<int64_t>& samples) const override {
    const at::Tensor i = torch::tensor(samples, torch::kLong) % size();
    return {torch::stack({i.sin(), i.cos(), i * 0.01}, 1), i.sin().gt(0).to(torch::kLong)};
  }
};

TEST_F(ResumeTest, WeightsMayBeStoredInAnotherMemoryOrder) {
  registry::models().add<Stored>("Stored");
  registry::datasets().add<Waves>("Waves");
  std::ofstream("c.yaml") << "model: {type: Stored, seed: 1}\ndata: {type: Waves}\n"
                             "loss: {type: cross_entropy}\noptimizer: {type: AdamW, lr: 0.1}\n"
                             "train: {steps: 6, global_batch: 12, ema: {decay: 0.9}}\n";
  for (const bool by_columns : {false, true}) {
    for (const auto& from : kWays) {
      fs::remove_all("a");
      stored_by_columns = by_columns;
      train_ranks(4, {from, "checkpoint.folder=a"});
      stored_by_columns = !by_columns;
      for (const auto& to : kWays) {
        for (const int world : {1, 3}) {
          if (world == 1 && to != kWays[1]) continue;
          fs::remove_all("b");
          train_ranks(world, {to, "checkpoint={folder: b, from: a/step-00000006}"});
          expect_equal_state("a/step-00000006", "b/step-00000006");
        }
      }
    }
  }
  stored_by_columns = false;
}

TEST_F(ResumeTest, ResumeIsTheDefaultAndCanBeRefused) {
  EXPECT_EQ(train({"c.yaml", "checkpoint.folder=c", "train.steps=3"}), 0) << err_;
  EXPECT_EQ(train({"c.yaml", "checkpoint.folder=c", "train.steps=5"}), 0) << err_;
  EXPECT_NE(out_.find("resuming from c/step-00000003"), std::string::npos) << out_;
  EXPECT_EQ(out_.find("step 2/4"), std::string::npos) << out_;
  EXPECT_NE(out_.find("step 3/4"), std::string::npos) << out_;
  EXPECT_EQ(train({"c.yaml", "checkpoint.folder=c", "train.steps=5"}), 0)
      << "nothing is left to do: " << err_;
  EXPECT_EQ(train({"c.yaml", "--no-resume", "checkpoint.folder=c", "train.steps=5"}), 0) << err_;
  EXPECT_NE(out_.find("step 0/4"), std::string::npos) << out_;
  EXPECT_TRUE(fs::exists("c/earlier-1/step-00000005")) << "nothing is lost";
  EXPECT_EQ(load_config("c/step-00000005/config.yaml").value("train.steps"), "5")
      << "a checkpoint has its config";
}

TEST_F(ResumeTest, RetentionKeepsTheLastAndMultiples) {
  train_ranks(2,
              {"train.steps=10", "checkpoint={folder: c, every: 1, keep_last: 2, keep_every: 4}"});
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator("c"))
    if (entry.is_directory()) left.push_back(entry.path().filename());
  std::sort(left.begin(), left.end());
  EXPECT_EQ(left, (std::vector<std::string>{"step-00000004", "step-00000008", "step-00000009",
                                            "step-00000010"}));
}

TEST_F(ResumeTest, CheckpointsThatDoNotFitAreErrors) {
  train_ranks(2, {"checkpoint.folder=c"});
  const auto says = [&](std::vector<std::string> overrides, const std::string& text) {
    overrides.push_back("checkpoint.folder=c");
    overrides.push_back("train.steps=9");
    try {
      train_ranks(2, overrides);
      ADD_FAILURE() << overrides[0] << " was accepted";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  says({"model.n_embd=32"}, "expected [");
  says({"model.n_head=4"},
       "command line: model.n_head: 4, but the weights of c/step-00000006 are of a model with 2; "
       "expected 2");
  says({"model.activation=relu"}, "model.activation: relu, but the weights of");
  says({"model.layer_norm_epsilon=1e-4"}, "model.layer_norm_epsilon: 0.0001, but the weights of");
  says({"model.n_layer=3"}, "missing transformer.h.2.");
  says({"data.seed=3", "data.order=shuffled"}, "sequential");
  says({"train.global_batch=10"}, "train.global_batch");
  says({"optimizer={type: SGD, momentum: 0.9, lr: 1e-3}"}, "momentum_buffer");
  train_ranks(
      2, {"checkpoint={folder: d, from: c/step-00000006}", "optimizer={type: Adam, lr: 1e-3}"});
  EXPECT_NE(
      out_.find("warning: command line: optimizer.type: Adam goes on with the state of AdamW\n"),
      std::string::npos)
      << out_;
  std::fstream file("c/step-00000006/model-00002-of-00002.safetensors",
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-3, std::ios::end);
  file.put('\x55');
  file.close();
  says({"train.save=null", "train.save_config=false"}, "model-00002-of-00002.safetensors");
}

TEST_F(ResumeTest, WeightsOfEveryRankAndOfOneFileAreTheSame) {
  for (const auto& wrapper : kWays) {
    fs::remove_all("parts");
    fs::remove_all("one");
    const auto options = [&](const char* more) {
      return std::vector<std::string>{wrapper, more, "train.steps=2"};
    };
    train_ranks(3, options("checkpoint.folder=parts"));
    train_ranks(3, options("checkpoint={folder: one, single_file: true}"));
    const std::string parts = "parts/step-00000002", one = "one/step-00000002";
    EXPECT_TRUE(fs::exists(one + "/weights.safetensors")) << wrapper;
    EXPECT_FALSE(fs::exists(one + "/" + kWeightsIndexName)) << wrapper;
    EXPECT_FALSE(fs::exists(parts + "/weights.safetensors")) << wrapper;
    expect_equal_state(parts, one);
    // What each rank wrote of the weights, and of the optimizer's state with whole parameters.
    const Weights weights(parts);
    uint64_t total = 0, largest = 0, all_state = 0, most_state = 0;
    for (const auto& entry : weights.entries()) {
      total += entry.end - entry.begin;
      largest = std::max(largest, entry.end - entry.begin);
    }
    const Checkpoint checkpoint(parts);
    for (const char* rank : {"1", "2", "3"}) {
      const std::string part = std::string("model-0000") + rank + "-of-00003.safetensors";
      EXPECT_LE(checkpoint.tensors(part).entries().back().end, total / 3 + largest) << wrapper;
      const int number = rank[0] - '1';
      const auto state = fs::file_size(parts + "/optimizer-0000" + std::to_string(number) +
                                       "-of-00003.safetensors");
      all_state += state;
      most_state = std::max<uint64_t>(most_state, state);
    }
    EXPECT_LE(most_state, all_state / 3 + 3 * largest) << wrapper;
    // Each goes on from the other, also on another number of ranks.
    for (const char* from : {"checkpoint={folder: d, from: parts/step-00000002}",
                             "checkpoint={folder: d, from: one/step-00000002}"}) {
      fs::remove_all("d");
      train_ranks(2, {wrapper, from, "train.steps=4"});
    }
    train_ranks(2, {wrapper, "model.init=" + parts, "train.steps=1"});
  }
}

TEST_F(ResumeTest, TheFinalWeightsGoToAFolderIfThePathEndsWithASlash) {
  train_ranks(2, {"train.save=w/", "train.steps=2"});
  train_ranks(2, {"train.save=w.safetensors", "train.steps=2"});
  const Weights parts("w"), one("w.safetensors");
  ASSERT_EQ(parts.entries().size(), one.entries().size());
  for (const auto& entry : one.entries())
    EXPECT_TRUE(at::equal(parts.load(entry.name), one.load(entry.name))) << entry.name;
  EXPECT_TRUE(fs::exists("w/model-00002-of-00002.safetensors"));
  EXPECT_THAT(thrown_by([&] {
                train_ranks(2, {"train.save=w/", "model.init=w"});
              }),
              HasSubstr("model.init reads it"));
}

TEST_F(ResumeTest, ASignalSavesACheckpointAndTheRunResumes) {
  const auto whole = train_ranks(2, {"train.steps=8"});
  struct Asker : RunHook {
    void after_step(RunState& state) override {
      if (state.step == 3) request_stop(SIGTERM);
    }
  };
  if (!registry::hooks().contains("Asker"))
    registry::hooks().add_plan("Asker", [] { return std::make_shared<Asker>(); });
  const auto stopped =
      train_ranks(2, {"train.steps=8", "checkpoint.folder=c", "hooks=[{type: Asker}]"});
  EXPECT_EQ(stopped.interrupted_by, SIGTERM);
  EXPECT_LE(stopped.losses.size(), 5u);
  EXPECT_GE(stopped.losses.size(), 4u);
  const auto rest = train_ranks(2, {"train.steps=8", "checkpoint.folder=c"});
  EXPECT_EQ(rest.interrupted_by, 0);
  auto losses = stopped.losses;
  losses.insert(losses.end(), rest.losses.begin(), rest.losses.end());
  EXPECT_EQ(losses, whole.losses);
  EXPECT_EQ(rest.eval_loss, whole.eval_loss);
}

TEST_F(ResumeTest, TheStateOfACommunicationHookIsResumed) {
  const std::vector<std::string> power{
      "parallel={type: DistributedDataParallel, comm_hook: {type: power_sgd, rank: 2, "
      "start_iteration: 2}}"};
  const auto whole = train_ranks(2, joined(power, {"train.steps=8"}));
  train_ranks(2, joined(power, {"train.steps=8", "checkpoint={folder: c, every: 5}"}));
  fs::remove_all("c/step-00000008");
  const auto rest = train_ranks(2, joined(power, {"train.steps=8", "checkpoint.folder=c"}));
  EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + 5, whole.losses.end()));
}

void change_a_byte(const std::string& path) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-3, std::ios::end);
  file.put('#');
}

TEST_F(ResumeTest, ADamagedCheckpointIsSetAsideWithFallback) {
  const std::vector<std::string> options{"checkpoint={folder: c, every: 2, keep_last: 3}"};
  const auto with = [&](const char* more) { return joined(options, {more}); };
  const auto whole = train_ranks(2, options);
  change_a_byte("c/step-00000006/model-00002-of-00002.safetensors");
  EXPECT_THAT(thrown_by([&] { train_ranks(2, options); }),
              HasSubstr("the file is damaged; older checkpoints in c: step-00000004, "
                        "step-00000002; to go on without it: mv 'c/step-00000006'"));
  const auto again = train_ranks(2, with("checkpoint.fallback=true"));
  EXPECT_EQ(again.first_step, 4);
  EXPECT_EQ(again.losses, std::vector<double>(whole.losses.begin() + 4, whole.losses.end()));
  EXPECT_THAT(out_, HasSubstr("it is set aside as c/damaged-step-00000006, and c/step-00000004 is "
                              "taken"));
  EXPECT_TRUE(fs::exists("c/damaged-step-00000006"));
  // Under a launcher that restarts it is the default; nothing before the last one is an error.
  for (const char* step : {"2", "4", "6"})
    change_a_byte(std::string("c/step-0000000") + step + "/model-00001-of-00002.safetensors");
  ::setenv("TORCHELASTIC_MAX_RESTARTS", "3", 1);
  const std::string none = thrown_by([&] { train_ranks(2, options); });
  const std::string off = thrown_by([&] { train_ranks(2, with("checkpoint.fallback=false")); });
  ::unsetenv("TORCHELASTIC_MAX_RESTARTS");
  EXPECT_TRUE(fs::exists("c/damaged-step-00000006-2")) << "the one from before stays";
  EXPECT_TRUE(fs::exists("c/damaged-step-00000006"));
  EXPECT_THAT(none, HasSubstr("checkpoint.fallback: there is no checkpoint before it"));
  EXPECT_THAT(off, HasSubstr("to go on without it"));
}

TEST_F(ResumeTest, AnErrorWhileReadingIsTriedAgainAndSetsNothingAside) {
  const std::vector<std::string> options{"checkpoint={folder: c, every: 2, fallback: true}"};
  train_ranks(2, options);
  const auto here = fs::current_path().string();
  const auto names = [] {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator("c")) found.insert(entry.path().filename());
    return found;
  };
  const auto before = names();
  for (const char* how : {"pread:EIO", "pread:ESTALE"}) {
    failing_files_begin(here.c_str(), how, 3, true);
    EXPECT_EQ(train_ranks(2, options).first_step, 6) << how;
    EXPECT_GT(failing_files_count(), 3);
    failing_files_begin(here.c_str(), (std::string(how) + "+").c_str(), 1, true);
    const std::string error = thrown_by([&] { train_ranks(2, options); });
    failing_files_begin("", "", 0, false);
    EXPECT_THAT(error, HasSubstr(how[7] == 'I' ? "Input/output error" : "Stale file handle"));
    EXPECT_EQ(names(), before);
  }
}

TEST_F(ResumeTest, ANewerVersionIsNeitherDamagedNorSetAside) {
  const std::vector<std::string> options{"checkpoint={folder: c, every: 2, fallback: true}"};
  train_ranks(2, options);
  std::string text = bytes_of("c/step-00000006/manifest.json");
  text.replace(text.find("\"version\": 1"), 12, "\"version\": 2");
  std::ofstream("c/step-00000006/manifest.json") << text;
  const std::string error = thrown_by([&] { train_ranks(2, options); });
  EXPECT_THAT(error, HasSubstr("its version is 2; this Tessera reads up to version 1"));
  EXPECT_THAT(error, ::testing::Not(HasSubstr("damaged")));
  EXPECT_TRUE(fs::exists("c/step-00000006"));
}

TEST_F(ResumeTest, AnotherOptimizerNamesTheOptionAndCanStartAnew) {
  const std::vector<std::string> options{"checkpoint={folder: c, every: 2}"};
  train_ranks(2, joined(options, {"train.steps=4"}));
  const char* sgd = "optimizer={type: SGD, lr: 0.1, momentum: 0.9}";
  EXPECT_THAT(
      thrown_by([&] { train_ranks(2, joined(options, {sgd})); }),
      HasSubstr("optimizer.type: SGD; c/step-00000004 is of a run with AdamW, and the error "
                "is: "));
  const auto anew = train_ranks(2, joined(options, {sgd, "checkpoint.optimizer=ignore"}));
  EXPECT_EQ(anew.first_step, 4);
  EXPECT_THAT(out_, HasSubstr("checkpoint.optimizer: ignore: SGD starts anew"));
}

}  // namespace
}  // namespace tessera
