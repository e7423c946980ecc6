#include <cstdio>

#include <gmock/gmock.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <torch/library.h>
#include <unistd.h>

#include "deferred/trainings.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "train/train_fixture.h"

// Another library of the process has a fallback on a dispatch key that this library uses, or a CPU
// allocator in front of this library's. docs/libtorch_internals.md says what works then.

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

constexpr auto kRecording = c10::DispatchKey::DeferredInit;
constexpr auto kDetection = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

void take(c10::DispatchKey key) {
  static torch::Library other(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  other.fallback(torch::CppFunction::makeFallthrough());
}

/// What this process logs from now on.
class Log {
 public:
  Log() {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>(
        "test", std::make_shared<spdlog::sinks::ostream_sink_mt>(text_)));
  }
  int lines_with(const std::string& part) const {
    int lines = 0;
    std::istringstream text(text_.str());
    for (std::string line; std::getline(text, line);) lines += line.find(part) != line.npos;
    return lines;
  }

 private:
  std::ostringstream text_;
};

constexpr int kChildEnded = 3;

/// `test` in a process of its own, because what is taken there is taken for good. It does not
/// return.
template <class Test>
void in_child(Test test) {
  Log& log = *new Log;
  test(log);
  std::fflush(nullptr);
  _exit(::testing::Test::HasFailure() ? 1 : kChildEnded);
}

#define EXPECT_HOLDS_IN_A_CHILD(...)              \
  GTEST_FLAG_SET(death_test_style, "threadsafe"); \
  EXPECT_EXIT(in_child(__VA_ARGS__), ::testing::ExitedWithCode(kChildEnded), "")

void expect_deferred_trains_as_eager_does() {
  for (const auto training : {&with_fsdp, &with_zero, &with_shared_parameters, &with_ddp}) {
    run_ranks(2, [training](ProcessGroup group, int rank) {
      EXPECT_EQ(training(make_net(true, rank), group, rank),
                training(make_net(false, rank), group, rank));
    });
  }
  EXPECT_FALSE(is_deferred(deferred_init([] { return torch::ones({300, 300}); })));
  EXPECT_EQ(deferred_stats().operators, 0u);
}

TEST(TakenKeysDeathTest, WithoutTheRecordingKeyModulesAreConstructedAtOnce) {
  EXPECT_HOLDS_IN_A_CHILD([](Log& log) {
    take(kRecording);
    expect_deferred_trains_as_eager_does();
    EXPECT_EQ(log.lines_with("deferred_init: another library has taken the dispatch key"), 1);
  });
}

TEST(TakenKeysDeathTest, WithoutTheAllocatorModulesAreConstructedAtOnce) {
  EXPECT_HOLDS_IN_A_CHILD([](Log& log) {
    c10::SetAllocator(at::kCPU, c10::GetAllocator(at::kCPU), 255);  // before all of lower priority
    expect_deferred_trains_as_eager_does();
    EXPECT_EQ(log.lines_with("deferred_init: a CPU allocator of the program hides"), 1);
  });
}

TEST(TakenKeysDeathTest, ALibraryThatComesLaterGetsTheErrorAndNothingChanges) {
  EXPECT_HOLDS_IN_A_CHILD([](Log& log) {
    const auto defers = [] {
      return is_deferred(deferred_init([] { return torch::ones({300, 300}); }));
    };
    EXPECT_TRUE(defers());
    EXPECT_THROW(take(kRecording), c10::Error);
    EXPECT_TRUE(defers());
    EXPECT_EQ(log.lines_with("deferred_init"), 0);
  });
}

TEST(TakenKeysDeathTest, WithoutTheDetectionKeyWhatNeedsItIsAnErrorThatNamesIt) {
  EXPECT_HOLDS_IN_A_CHILD([](Log&) {
    take(kDetection);
    const auto expect_refused = [](const std::string& subject, const Training& training) {
      const auto errors = run_ranks_catching(
          2, [&](ProcessGroup group, int rank) { training(make_net(false, rank), group, rank); });
      for (int rank = 0; rank < 2; ++rank) {
        EXPECT_THAT(message_of(errors[rank]), HasSubstr(subject));
        EXPECT_THAT(message_of(errors[rank]), HasSubstr("TESTING_ONLY_GenericWrapper"));
      }
      expect_usage_errors(errors, "taken the dispatch key");
    };
    expect_refused("FullyShardedDataParallel: rank ", with_fsdp);
    expect_refused("option share_parameters", with_shared_parameters);
    expect_refused("option share_parameters", [](TiedNet net, ProcessGroup group, int rank) {
      return train_with_ddp(net, group, rank, {.share_parameters = true});
    });
    expect_refused("option shard_gradients", [](TiedNet net, ProcessGroup group, int rank) {
      return train_with_zero(net, group, rank, {.shard_gradients = true});
    });
  });
}

TEST(TakenKeysDeathTest, WithoutTheDetectionKeyTheOthersTrainAndTheLogNamesWhatIsOff) {
  EXPECT_HOLDS_IN_A_CHILD([](Log& log) {
    take(kDetection);
    run_ranks(2, [](ProcessGroup group, int rank) {
      const auto net = [rank] { return make_net(true, rank); };
      auto early = net(), late = net();
      EXPECT_EQ(train_with_zero(early, group, rank, {}),
                train_with_zero(late, group, rank, {.overlap = Overlap::background}));
      early = net(), late = net();
      EXPECT_EQ(train_with_ddp(early, group, rank, {}),
                train_with_ddp(late, group, rank, {.overlap = Overlap::background}));
    });
    EXPECT_GT(deferred_stats().deferred, 0u) << "deferred_init() does not need the key";
    EXPECT_EQ(log.lines_with("overlap background is off"), 2);
    EXPECT_GT(log.lines_with("clipping by one rank's norm is off"), 0);
  });
}

/// The folder of the fixture is removed before the child ends.
class TakenKeysTrainingDeathTest : public TrainFixture {
 protected:
  std::vector<double> losses(const std::string& wrapper, const std::string& more) {
    return train_ranks(2, {wrapper, "model.n_embd=64", more}).losses;
  }
};

TEST_F(TakenKeysTrainingDeathTest, TheTrainerNeedsNoRecordingKey) {
  EXPECT_HOLDS_IN_A_CHILD([this](Log& log) {
    take(kRecording);
    for (const auto& wrapper : kWrappers) {
      const auto eager = losses(wrapper, "model.deferred=false");
      EXPECT_EQ(texts(losses(wrapper, "model.deferred=true")), texts(eager)) << wrapper;
    }
    losses(kWrappers.back(), "checkpoint.folder=c");  // it defers by default, and
    EXPECT_FALSE(std::filesystem::is_empty("c"));
    EXPECT_EQ(log.lines_with("taken the dispatch key DeferredInit"), 1);
    EXPECT_EQ(deferred_stats().deferred, 0u);
    TearDown();
  });
}

TEST_F(TakenKeysTrainingDeathTest, TheTrainerNeedsTheDetectionKeyForFsdpAlone) {
  EXPECT_HOLDS_IN_A_CHILD([this](Log&) {
    take(kDetection);
    const auto expected = losses(kWrappers[0], "train.steps=6");
    ASSERT_EQ(expected.size(), 6u);
    for (size_t i = 1; i + 1 < kWrappers.size(); ++i)
      expect_near(losses(kWrappers[i], "train.steps=6"), expected, 1e-5);
    EXPECT_THAT(thrown_by([this] { losses(kWrappers.back(), "train.steps=6"); }),
                HasSubstr("TESTING_ONLY_GenericWrapper"));
    TearDown();
  });
}

}  // namespace
}  // namespace tessera::testing
