#include <atomic>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/file.h>

#include "harness/thrown_by.h"
#include "train/train_fixture.h"

// Ranks with other options or other data end before the first step.

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using RunContract = testing::TrainFixture;

/// Rows of one number, or of random ones.
class Rows : public Dataset {
 public:
  Rows(int64_t size, double value, bool random) : size_(size), value_(value), random_(random) {}
  int64_t size() const override { return size_; }
  Batch get(const std::vector<int64_t>& samples) const override {
    const auto rows = static_cast<int64_t>(samples.size());
    auto inputs = at::full({rows, 16}, 1, at::kLong);
    if (random_) inputs.random_(0, 200);
    if (!samples.empty() && samples.back() == size_ - 1) inputs[rows - 1][15] = value_;
    return {inputs, at::full({rows, 16}, 2, at::kLong)};
  }
  std::string describe() const override { return "rows"; }

 private:
  int64_t size_;
  double value_;
  bool random_;
};

/// What rank `rank` of `world` throws when its config has `overrides(rank)` and `change` was
/// applied to it.
std::vector<std::string> errors_of(
    int world, const std::function<std::vector<std::string>(int)>& overrides,
    const std::function<void(Config&, int)>& change = [](Config&, int) {}) {
  std::vector<Config> configs;
  for (int rank = 0; rank < world; ++rank) {
    auto list = overrides(rank);
    list.insert(list.begin(), "parallel.type=DistributedDataParallel");
    configs.push_back(load_config("c.yaml", list));
    change(configs.back(), rank);
  }
  std::vector<std::string> errors;
  ::testing::internal::CaptureStdout();
  const auto thrown = testing::run_ranks_catching(
      world, [&](ProcessGroup group, int rank) { run_training(configs[rank], group); });
  ::testing::internal::GetCapturedStdout();
  for (const auto& error : thrown)
    errors.push_back(error ? testing::message_of(error) : "no error");
  return errors;
}

TEST_F(RunContract, AValueThatDiffersIsAnErrorWithKeyRanksAndValues) {
  std::ofstream("other.txt") << bytes_of("text.txt");
  const struct {
    std::string key, first, second;
  } cases[] = {
      {"optimizer.lr", "1e-3", "0.01"},
      {"optimizer.betas", "[0.9, 0.95]", "[0.9, 0.99]"},
      {"optimizer.type", "AdamW", "SGD"},
      {"train.clip_grad_norm", "1", "2"},
      {"scheduler", "{type: cosine, t_max: 9}", "{type: constant}"},
      {"data.seed", "0", "1"},
      {"data.path", "text.txt", "other.txt"},
      {"model.n_head", "2", "4"},
      {"train.global_batch", "12", "24"},
      {"checkpoint.folder", "a", "b"},
  };
  for (const auto& [key, first, second] : cases) {
    const auto errors = errors_of(3, [&, key = key, first = first, second = second](int rank) {
      std::vector<std::string> list;
      if (key.rfind("optimizer", 0) == 0) list.push_back("optimizer={type: AdamW, lr: 1e-3}");
      if (key == "optimizer.type") list = {"optimizer={lr: 1e-3, type: AdamW}"};
      list.push_back(key + "=" + (rank == 1 ? second : first));
      return list;
    });
    for (const auto& error : errors) {
      EXPECT_THAT(error, AllOf(HasSubstr(key), HasSubstr(": the ranks differ: "),
                               HasSubstr(" on ranks 0, 2"),
                               HasSubstr(" on rank 1; expected the same on all ranks")))
          << key;
    }
  }
  EXPECT_FALSE(std::filesystem::exists("a")) << "found before anything was made";
}

TEST_F(RunContract, WhatConcernsOneRankAloneMayDiffer) {
  for (const auto& error : errors_of(2, [](int rank) {
         return std::vector<std::string>{"train.log=log" + std::to_string(rank) + ".jsonl",
                                         "data.loader_threads=" + std::to_string(rank + 1),
                                         "data.prefetch=" + std::to_string(rank),
                                         "train.log_every=" + std::to_string(rank + 1)};
       }))
    EXPECT_EQ(error, "no error");
}

TEST_F(RunContract, TwoRunsDoNotShareALog) {
  std::filesystem::create_directory("out");
  const int other = ::open("out/log.jsonl", O_RDWR | O_CREAT, 0600);
  ASSERT_EQ(::write(other, "theirs\n", 7), 7);
  ASSERT_EQ(::flock(other, LOCK_EX), 0);
  EXPECT_EQ(train({"c.yaml"}), 2);
  EXPECT_THAT(err_, HasSubstr("train.log: out/log.jsonl: another run is writing this file"));
  EXPECT_EQ(bytes_of("out/log.jsonl"), "theirs\n");
  ::close(other);
  EXPECT_EQ(train({"c.yaml"}), 0);
  EXPECT_EQ(log().size(), 6u);
}

TEST_F(RunContract, OtherDataIsAnErrorUnlessItIsRandom) {
  const auto with = [](std::vector<Rows> rows) {
    return errors_of(
        2, [](int) { return std::vector<std::string>(); },
        [&](Config& config, int rank) {
          config.data.plan.load = [row = rows[static_cast<size_t>(rank)]] {
            return DataSplits{std::make_shared<Rows>(row)};
          };
        });
  };
  for (const auto& error : with({{40, 1, false}, {41, 1, false}}))
    EXPECT_THAT(error,
                HasSubstr("data.train, number of samples: the ranks differ: 40 on rank 0; 41 "
                          "on rank 1"));
  for (const auto& error : with({{40, 1, false}, {40, 2, false}}))
    EXPECT_THAT(error, AllOf(HasSubstr("data.train, samples 0, 2, "), HasSubstr(", 39: the ranks"),
                             HasSubstr("digest ")));
  for (const auto& error : with({{40, 1, true}, {40, 1, true}})) EXPECT_EQ(error, "no error");
  for (const auto& error : with({{40, 1, false}, {40, 1, false}})) EXPECT_EQ(error, "no error");
}

/// Has one row too few on rank 1, from its third batch on.
class FewerRows : public Rows {
 public:
  explicit FewerRows(int rank) : Rows(40, 1, false), rank_(rank) {}
  Batch get(const std::vector<int64_t>& samples) const override {
    Batch batch = Rows::get(samples);
    if (rank_ == 1 && samples.size() == 6 && ++batches_ > 2) {
      batch.inputs = batch.inputs.narrow(0, 0, 5);
      batch.targets = batch.targets.narrow(0, 0, 5);
    }
    return batch;
  }

 private:
  int rank_;
  mutable std::atomic<int> batches_ = 0;
};

TEST_F(RunContract, AnotherNumberOfRowsOnOneRankIsAnErrorThere) {
  const auto errors = errors_of(
      2, [](int) { return std::vector<std::string>(); },
      [&](Config& config, int rank) {
        config.data.plan.load = [rank] { return DataSplits{std::make_shared<FewerRows>(rank)}; };
      });
  EXPECT_THAT(errors[1], HasSubstr("iteration 2: data: rows: inputs has 5 rows for 6 samples"));
  // The other rank names the step, the rank, the collective and the parameters.
  EXPECT_THAT(errors[0], AllOf(StartsWith("step 2, forward, backward and update: ProcessGroup"),
                               HasSubstr("rank 1 "), HasSubstr("gave up in all_reduce #"),
                               HasSubstr("; its purpose: scale 0.5, bucket 0 of backward 3, after "
                                         "3 forward passes: transformer.")));
}

}  // namespace
}  // namespace tessera
