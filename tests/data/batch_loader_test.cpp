#include "tessera/data/batch_loader.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "harness/thrown_by.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::thrown_by;
using namespace std::chrono_literals;

/// A dataset whose inputs are the sample numbers. `before` runs before each batch, with its first
/// sample.
class Numbers : public Dataset {
 public:
  explicit Numbers(std::function<void(int64_t)> before = [](int64_t) {})
      : before_(std::move(before)) {}

  int64_t size() const override { return 1000; }
  Batch get(const std::vector<int64_t>& samples) const override {
    before_(samples.at(0));
    return {at::tensor(samples, at::kLong), at::tensor(samples, at::kLong) + 1};
  }
  std::string describe() const override { return "Numbers"; }

 private:
  std::function<void(int64_t)> before_;
};

std::vector<int64_t> pair_of(int64_t iteration) { return {2 * iteration, 2 * iteration + 1}; }

template <class Condition>
bool comes_true(const Condition& condition) {
  for (int i = 0; i < 2000 && !condition(); ++i) std::this_thread::sleep_for(5ms);
  return condition();
}

/// Threads that call pass() wait until open() is called.
class Door {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    open_.wait_for(lock, 20s, [&] { return is_open_; });
    --waiting_;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    open_.notify_all();
  }
  int waiting() const {
    const std::lock_guard lock(mutex_);
    return waiting_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable open_;
  bool is_open_ = false;
  int waiting_ = 0;
};

TEST(BatchLoader, ReturnsTheIterationsInOrderForAnyNumberOfThreads) {
  // Some later batches are ready before earlier ones.
  const auto uneven = std::make_shared<Numbers>(
      [](int64_t first) { std::this_thread::sleep_for(first % 6 == 0 ? 3ms : 0ms); });
  for (const int threads : {1, 2, 5}) {
    for (const int depth : {0, 1, 3, 8}) {
      BatchLoader loader(uneven, pair_of, 3, 40, {threads, depth});
      for (int64_t i = 3; i < 40; ++i) {
        EXPECT_EQ(loader.iteration(), i);
        const Batch batch = loader.next();
        ASSERT_TRUE(at::equal(batch.inputs, at::tensor(pair_of(i), at::kLong)))
            << threads << " " << depth << " " << i;
        ASSERT_TRUE(at::equal(batch.targets, batch.inputs + 1));
      }
      EXPECT_THAT(thrown_by([&] { loader.next(); }),
                  HasSubstr("no iteration is left, the last one was 39"));
    }
  }
}

TEST(BatchLoader, LoadsDepthBatchesAhead) {
  std::atomic<int> loaded{0};
  const auto counting = std::make_shared<Numbers>([&](int64_t) { ++loaded; });
  BatchLoader loader(counting, pair_of, 0, 100, {2, 3});
  EXPECT_TRUE(comes_true([&] { return loaded == 3; }));
  loader.next();
  EXPECT_TRUE(comes_true([&] { return loaded == 4; }));
  std::this_thread::sleep_for(30ms);
  EXPECT_EQ(loaded, 4);
}

TEST(BatchLoader, ThreadsLoadAtTheSameTime) {
  Door door;
  const auto held = std::make_shared<Numbers>([&](int64_t) { door.pass(); });
  BatchLoader loader(held, pair_of, 0, 100, {3, 3});
  EXPECT_TRUE(comes_true([&] { return door.waiting() == 3; }));
  door.open();
  EXPECT_EQ(loader.next().inputs[0].item<int64_t>(), 0);
}

TEST(BatchLoader, AnErrorIsThrownForItsIterationAndNamesIt) {
  const auto failing = std::make_shared<Numbers>([](int64_t first) {
    if (first == 4) throw UsageError("Numbers: bad sample");
    if (first == 6) throw std::runtime_error("disk gone");
    if (first == 8) throw 7;
    if (first == 10) TORCH_CHECK(false, "shapes differ");
  });
  for (const int depth : {0, 1, 4}) {
    BatchLoader loader(failing, pair_of, 0, 8, {2, depth});
    const auto error = [&] {
      try {
        loader.next();
      } catch (const UsageError& e) {
        return std::string("UsageError ") + e.what();
      } catch (const Error& e) {
        return std::string("Error ") + e.what();
      }
      return std::string("none");
    };
    EXPECT_EQ(error(), "none");
    EXPECT_EQ(error(), "none");
    EXPECT_EQ(error(), "UsageError BatchLoader: iteration 2: Numbers: bad sample");
    EXPECT_EQ(error(), "Error BatchLoader: iteration 3: disk gone");
    EXPECT_THAT(error(), HasSubstr("iteration 4: an exception that is not a std::exception"));
    EXPECT_EQ(error(), "Error BatchLoader: iteration 5: shapes differ");
    EXPECT_EQ(loader.next().inputs[0].item<int64_t>(), 12);
  }
  BatchLoader loader(
      std::make_shared<Numbers>(),
      [](int64_t) -> std::vector<int64_t> { throw UsageError("no samples"); }, 5, 6);
  EXPECT_THAT(thrown_by([&] { loader.next(); }), HasSubstr("iteration 5: no samples"));
}

TEST(BatchLoader, ItsDestructorWaitsForBegunBatchesAndBeginsNoOthers) {
  std::atomic<int> begun{0};
  Door door;
  const auto held = std::make_shared<Numbers>([&](int64_t) {
    ++begun;
    door.pass();
    std::this_thread::sleep_for(20ms);  // all 100 batches would take a second
  });
  {
    auto loader = std::make_unique<BatchLoader>(held, pair_of, 0, 100, BatchLoaderOptions{2, 100});
    ASSERT_TRUE(comes_true([&] { return door.waiting() == 2; }));
    std::thread ending([&] { loader.reset(); });
    std::this_thread::sleep_for(50ms);
    door.open();
    ending.join();
  }
  EXPECT_LT(begun, 100);
  for (int i = 0; i < 50; ++i) {
    BatchLoader(std::make_shared<Numbers>(), pair_of, 0, 100,
                {3, 2});  // before, while and after threads begin
  }
}

TEST(BatchLoader, ItsThreadsDoNotChangeTheCallersAutogradOrThreadSettings) {
  const int before = at::get_num_threads();
  at::set_num_threads(3);
  std::mutex mutex;
  std::set<int> threads_there;
  std::set<bool> autograd_there;
  const auto looking = std::make_shared<Numbers>([&](int64_t) {
    const std::lock_guard lock(mutex);
    threads_there.insert(at::get_num_threads());
    autograd_there.insert(at::GradMode::is_enabled());
  });
  {
    BatchLoader loader(looking, pair_of, 0, 8, {2, 2});
    for (int i = 0; i < 8; ++i) loader.next();
  }
  EXPECT_EQ(threads_there, std::set<int>{1});
  EXPECT_EQ(autograd_there, std::set<bool>{false});
  EXPECT_EQ(at::get_num_threads(), 3);
  int elsewhere = 0;
  std::thread([&] { elsewhere = at::get_num_threads(); }).join();
  EXPECT_EQ(elsewhere, 3) << "the initial number of other threads";
  EXPECT_TRUE(at::GradMode::is_enabled());
  BatchLoader here(looking, pair_of, 0, 1, {1, 0});
  EXPECT_FALSE(here.next().inputs.requires_grad());
  EXPECT_EQ(autograd_there, std::set<bool>{false});
  EXPECT_TRUE(at::GradMode::is_enabled());
  at::set_num_threads(before);
}

TEST(BatchLoader, WaitedCountsTheSecondsInNext) {
  Door door;
  const auto held = std::make_shared<Numbers>([&](int64_t) { door.pass(); });
  BatchLoader loader(held, pair_of, 0, 10);
  EXPECT_EQ(loader.waited(), 0);
  std::thread opening([&] {
    std::this_thread::sleep_for(40ms);
    door.open();
  });
  const auto begin = std::chrono::steady_clock::now();
  loader.next();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  opening.join();
  EXPECT_GT(loader.waited(), 0);
  EXPECT_LE(loader.waited(), took.count());
}

/// Rows for the samples, but `wrong` more rows in one tensor.
class MoreRows : public Dataset {
 public:
  explicit MoreRows(std::string wrong) : wrong_(std::move(wrong)) {}
  int64_t size() const override { return 10; }
  Batch get(const std::vector<int64_t>& samples) const override {
    const auto rows = [&](const std::string& name) {
      return at::zeros({static_cast<int64_t>(samples.size()) + (name == wrong_), 3});
    };
    if (wrong_ == "undefined") return {};
    if (wrong_ == "no dimension") return {at::scalar_tensor(1), {}};
    return {rows("inputs"), rows("targets"), {{"mask", rows("mask")}}};
  }
  std::string describe() const override { return "MoreRows"; }

 private:
  std::string wrong_;
};

TEST(BatchLoader, RefusesBatchesWithAnotherNumberOfRows) {
  const auto error_of = [](const std::string& wrong) {
    BatchLoader loader(std::make_shared<MoreRows>(wrong), pair_of, 3, 4);
    return thrown_by([&] { loader.next(); });
  };
  EXPECT_EQ(error_of("inputs"),
            "BatchLoader: iteration 3: data: MoreRows: inputs has 3 rows for 2 samples; expected "
            "one row a sample");
  EXPECT_THAT(error_of("targets"), HasSubstr("targets has 3 rows for 2 samples"));
  EXPECT_THAT(error_of("mask"), HasSubstr("extra.mask has 3 rows for 2 samples"));
  EXPECT_THAT(error_of("undefined"), HasSubstr("inputs is an undefined tensor"));
  EXPECT_THAT(error_of("no dimension"), HasSubstr("inputs has no dimension for 2 samples"));
  EXPECT_EQ(error_of(""), "no error");
  EXPECT_EQ(load_batch(MoreRows(""), {}).inputs.size(0), 0);
}

TEST(BatchLoader, RefusesOptionsOutOfRange) {
  const auto data = std::make_shared<Numbers>();
  EXPECT_THAT(thrown_by([&] { BatchLoader(nullptr, pair_of, 0, 1); }),
              HasSubstr("dataset or samples_of is null"));
  EXPECT_THAT(thrown_by([&] { BatchLoader(data, nullptr, 0, 1); }),
              HasSubstr("dataset or samples_of is null"));
  EXPECT_THAT(thrown_by([&] { BatchLoader(data, pair_of, 2, 1); }), HasSubstr("[2, 1)"));
  EXPECT_THAT(thrown_by([&] {
                BatchLoader(data, pair_of, 0, 1, {0, 2});
              }),
              HasSubstr("threads is 0"));
  EXPECT_THAT(thrown_by([&] {
                BatchLoader(data, pair_of, 0, 1, {1, -1});
              }),
              HasSubstr("depth is -1"));
  BatchLoader none(data, pair_of, 4, 4);
  EXPECT_THROW(none.next(), UsageError);
}

}  // namespace
}  // namespace tessera
