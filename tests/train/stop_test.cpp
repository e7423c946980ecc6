#include <chrono>
#include <csignal>
#include <thread>

#include <unistd.h>

#include "tessera/train.h"
#include "train/run/stop_requests.h"
#include "train/train_fixture.h"

// What a signal asks of a run, and what the run that goes on makes up for.

namespace tessera {
namespace {

namespace fs = std::filesystem;

TEST(Signals, ASecondSignalWithinASecondIsIgnored) {
  train::handle_signals();
  std::raise(SIGTERM);
  std::raise(SIGTERM);
  std::raise(SIGINT);
  EXPECT_EQ(train::stop_requested(), SIGTERM);
  request_stop(0);
}

TEST(Signals, ASecondSignalAfterASecondEndsTheProcess) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto stop_twice = [] {
    train::handle_signals();
    std::raise(SIGTERM);
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    std::raise(SIGINT);
    _exit(0);
  };
  EXPECT_EXIT(stop_twice(), ::testing::ExitedWithCode(130), "");
}

class StopTest : public testing::TrainFixture {
 protected:
  struct Asker : RunHook {
    explicit Asker(int64_t last) : step(last) {}
    void after_step(RunState& state) override {
      if (state.step == step) request_stop(SIGTERM);
    }
    void after_evaluation(RunState& state) override { evaluated.push_back(state.step); }
    std::string state() const override { return std::to_string(evaluated.size()); }
    void load_state(const std::string& text) override { evaluated.resize(std::stoul(text)); }

    int64_t step;
    std::vector<int64_t> evaluated;
  };

  static void SetUpTestSuite() {
    registry::hooks().add("AsksAt", [](OptionReader& options) {
      int64_t step = 0;
      options.read("step", step, "when the run is asked to stop");
      options.finish();
      return [step] { return std::make_shared<Asker>(step); };
    });
  }

  static nlohmann::json state_of(const std::string& checkpoint) {
    return nlohmann::json::parse(bytes_of(checkpoint + "/state.json"));
  }

  std::vector<nlohmann::json> log_without_times() const {
    auto lines = log();
    for (auto& line : lines)
      for (const char* key : {"ms", "tokens_per_s", "samples_per_s"}) line.erase(key);
    return lines;
  }
};

TEST_F(StopTest, ADueEvaluationIsRunAfterResuming) {
  const std::vector<std::string> options{"train.steps=6", "train.eval_every=1",
                                         "train.early_stop.patience=50", "train.ema.decay=0.9"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), options.begin(), options.end());
    return train_ranks(2, more);
  };
  const auto whole =
      with({"checkpoint.folder=whole", "hooks=[{type: AsksAt}, {type: CSV, path: w.csv}]"});
  const auto expected = log_without_times();
  for (const int64_t step : {2, 5}) {  // asked after step 5, the run ends within the last one
    fs::remove_all("parts");
    fs::remove("out/log.jsonl");
    const std::string csv = ", {type: CSV, path: t.csv}]";
    const std::string hooks = "hooks=[{type: AsksAt, step: " + std::to_string(step) + "}" + csv;
    const auto first = with({"checkpoint.folder=parts", hooks});
    ASSERT_EQ(first.interrupted_by, SIGTERM);
    const auto state = state_of(first.checkpoint);
    EXPECT_TRUE(state.contains("evaluation_due")) << "the checkpoint came first";
    ASSERT_EQ(log().size(), first.losses.size());
    EXPECT_FALSE(log().back().contains("eval_loss"));
    const auto rest = with({"checkpoint.folder=parts", "hooks=[{type: AsksAt}" + csv});
    EXPECT_EQ(log_without_times(), expected);
    const std::string table = bytes_of("t.csv"), header = table.substr(0, table.find('\n'));
    EXPECT_NE(header.find("eval_loss"), header.npos);
    EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 7) << "a row for each step: " << table;
    EXPECT_EQ(rest.best_eval_loss, whole.best_eval_loss);
    EXPECT_EQ(rest.eval_loss, whole.eval_loss);
    EXPECT_EQ(bytes_of("parts/step-00000006/state.json"),
              bytes_of("whole/step-00000006/state.json"))
        << "once each";
  }
}

TEST_F(StopTest, StepsKeepTheirNumbersWithAnotherWorldSize) {
  // 9 samples per step: 3 ranks take 3 each; 2 ranks take 5 each, so an iteration has 10.
  const std::vector<std::string> options{"checkpoint.folder=c", "train.global_batch=9",
                                         "data.uneven=join"};
  const auto with = [&](int world, const std::string& steps) {
    auto all = options;
    all.push_back(steps);
    return train_ranks(world, all);
  };
  with(3, "train.steps=7");
  const auto rest = with(2, "train.steps=12");
  EXPECT_EQ(rest.first_step, 7);
  const auto lines = log();
  for (size_t i = 0; i < lines.size(); ++i) EXPECT_EQ(lines[i]["step"], i) << "every step once";
  const auto state = state_of(rest.checkpoint);
  EXPECT_EQ(state["step"], 12) << "63 of 108 samples are assigned: five iterations of 10 remain";
  EXPECT_EQ(state["samples"], 108) << "the last iteration had 5 rather than 10";
  const auto epoch = [&](size_t step) { return lines.at(step)["epoch"].get<double>(); };
  EXPECT_NEAR(epoch(10) / epoch(6), 103.0 / 63, 1e-9) << "an epoch is a number of samples";
  EXPECT_NEAR(epoch(11) / epoch(6), 108.0 / 63, 1e-9);
}

TEST_F(StopTest, AnotherGlobalBatchIsRefusedAndItsAdviceWorks) {
  ASSERT_EQ(train({"c.yaml", "checkpoint.folder=c"}), 0) << err_;
  const auto before = bytes_of("out/log.jsonl");
  // Twice the batch divides the samples that were seen: six steps would be three.
  ASSERT_EQ(train({"c.yaml", "checkpoint.folder=c", "train.global_batch=24", "train.steps=9"}), 2);
  const std::string init = "model.init=c/step-00000006";
  EXPECT_NE(err_.find("tessera train: command line: train.global_batch: 24, but c/step-00000006 is "
                      "of a run with 12; expected 12, or"),
            std::string::npos)
      << err_;
  EXPECT_NE(err_.find(init), std::string::npos) << err_;
  EXPECT_EQ(bytes_of("out/log.jsonl"), before);
  EXPECT_EQ(train({"c.yaml", "checkpoint.folder=d", init, "train.global_batch=24"}), 0) << err_;
}

TEST_F(StopTest, TheAdviceAfterADamagedCheckpointWorks) {
  const std::vector<std::string> command{"c.yaml", "checkpoint={folder: a run's, every: 2}"};
  ASSERT_EQ(train(command), 0) << err_;
  for (const std::string newest : {"step-00000006", "step-00000004"}) {
    const std::string path = "a run's/" + newest;
    fs::resize_file(path + "/weights.safetensors", 100);
    ASSERT_EQ(train(command), 2);
    EXPECT_NE(err_.find("checkpoint: " + path + "/weights.safetensors: the file has 100 bytes"),
              std::string::npos)
        << err_;
    const size_t from = err_.find("mv "), to = err_.find(", and the same command again");
    ASSERT_TRUE(from < to && to != std::string::npos) << err_;
    ASSERT_EQ(std::system(err_.substr(from, to - from).c_str()), 0) << err_;
    EXPECT_TRUE(fs::exists("a run's/damaged-" + newest));
  }
  EXPECT_EQ(train(command), 0) << "nothing is left, so it starts anew: " << err_;
  fs::resize_file("a run's/step-00000006/manifest.json", 100);
  EXPECT_EQ(train({"c.yaml", "checkpoint.from=a run's/step-00000006"}), 2);
  EXPECT_NE(err_.find("tessera train: command line: checkpoint.from: checkpoint: a "
                      "run's/step-00000006/manifest.json"),
            std::string::npos)
      << err_;
}

}  // namespace
}  // namespace tessera
