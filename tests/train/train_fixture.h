#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "harness/ranks.h"
#include "tessera/train.h"

namespace tessera::testing {

/// One override for each wrapper of several ranks.
inline const std::vector<std::string> kWrappers{
    "parallel.type=DistributedDataParallel", "parallel.type=ZeroRedundancyOptimizer",
    "parallel={type: DistributedOptimizer, reduce_method: mean}",
    "parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}}"};

/// A folder of its own with text.txt and c.yaml, a small GPT-2 for 6 steps of 12 sequences.
class TrainFixture : public ::testing::Test {
 protected:
  static constexpr const char* kConfig = R"(
model: {type: GPT2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2, seed: 1}
data: {type: ByteText, path: text.txt, seq_len: 16, order: sequential}
optimizer: {type: AdamW, lr: 3e-3, betas: [0.9, 0.95], weight_decay: 0.1}
train: {steps: 6, global_batch: 12, log: out/log.jsonl, save: out/model.safetensors,
        save_config: true}
)";

  void SetUp() override {
    char name[] = "/tmp/tessera-train-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    folder_ = name;
    ASSERT_EQ(::chdir(name), 0);
    std::ofstream text("text.txt");
    for (int i = 0; i < 600; ++i) text << "line " << i << " of a text that nobody wrote\n";
    std::ofstream("c.yaml") << kConfig;
  }
  void TearDown() override {
    ASSERT_EQ(::chdir("/"), 0);
    std::filesystem::remove_all(folder_);
  }

  /// Runs train_main in this process, a world of one; returns its exit code and keeps what it
  /// printed.
  int train(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "tessera-train");
    std::vector<char*> argv;
    for (auto& argument : arguments) argv.push_back(argument.data());
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    const int code = train_main(static_cast<int>(argv.size()), argv.data());
    out_ = ::testing::internal::GetCapturedStdout();
    err_ = ::testing::internal::GetCapturedStderr();
    return code;
  }

  /// Trains on `world` threads; returns rank 0's result after comparing it with the others'.
  /// `hosts`: see run_ranks().
  TrainResult train_ranks(int world, std::vector<std::string> overrides,
                          const std::vector<int>& hosts = {}) {
    if (world > 1 && std::none_of(overrides.begin(), overrides.end(), [](const std::string& o) {
          return o.rfind("parallel.type=", 0) == 0 || o.rfind("parallel=", 0) == 0;
        }))
      overrides.push_back("parallel.type=ZeroRedundancyOptimizer");
    const Config config = load_config("c.yaml", overrides);
    std::vector<TrainResult> results(static_cast<size_t>(world));
    ::testing::internal::CaptureStdout();
    try {
      run_ranks(
          world,
          [&](ProcessGroup group, int rank) {
            results[static_cast<size_t>(rank)] = run_training(config, group);
          },
          {}, hosts);
    } catch (...) {
      out_ = ::testing::internal::GetCapturedStdout();
      throw;
    }
    out_ = ::testing::internal::GetCapturedStdout();
    for (const auto& result : results) {
      EXPECT_EQ(texts(result.losses), texts(results[0].losses));
      EXPECT_EQ(texts(result.grad_norms), texts(results[0].grad_norms));
      EXPECT_EQ(result.eval_loss, results[0].eval_loss);
    }
    return results[0];
  }

  /// Exact, with equal texts for all NaNs.
  static std::vector<std::string> texts(const std::vector<double>& values) {
    std::vector<std::string> texts;
    for (const double value : values)
      texts.push_back(std::isnan(value) ? "nan" : fmt::format("{:a}", value));
    return texts;
  }

  std::vector<nlohmann::json> log() const {
    std::vector<nlohmann::json> lines;
    std::ifstream file("out/log.jsonl");
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }

  static std::string bytes_of(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }

  std::filesystem::path folder_;
  std::string out_, err_;
};

inline void expect_near(const std::vector<double>& a, const std::vector<double>& b,
                        double relative) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_NEAR(a[i], b[i], relative * std::abs(b[i])) << "step " << i;
}

}  // namespace tessera::testing
