#include "tessera/data/sample_buffer.h"

#include <cmath>
#include <set>

#include "harness/thrown_by.h"

namespace tessera {
namespace {

using testing::thrown_by;

/// Samples [first, first + count): inputs {i, -i}, targets {i}.
Batch numbered(int64_t first, int64_t count) {
  const at::Tensor i = at::arange(first, first + count, at::kFloat);
  return {at::stack({i, -i}, 1), i.unsqueeze(1), {}};
}

void add(SampleBuffer& buffer, int64_t first, int64_t count) {
  const Batch batch = numbered(first, count);
  buffer.add(batch.inputs, batch.targets);
}

std::vector<int64_t> numbers_of(const Batch& batch) {
  std::vector<int64_t> numbers;
  for (int64_t i = 0; i < batch.inputs.size(0); ++i) {
    numbers.push_back(batch.targets[i][0].item<int64_t>());
    EXPECT_EQ(batch.inputs[i][0].item<float>(), static_cast<float>(numbers.back()));
    EXPECT_EQ(batch.inputs[i][1].item<float>(), static_cast<float>(-numbers.back()));
  }
  return numbers;
}

std::set<int64_t> kept_by(SampleBuffer& buffer) {
  const auto numbers = numbers_of(buffer.draw(buffer.size()));
  EXPECT_EQ(static_cast<int64_t>(numbers.size()), buffer.size());
  return {numbers.begin(), numbers.end()};
}

std::set<int64_t> range(int64_t first, int64_t count) {
  std::set<int64_t> numbers;
  for (int64_t i = first; i < first + count; ++i) numbers.insert(i);
  return numbers;
}

TEST(SampleBuffer, KeepsAllOrTheNewest) {
  for (const std::vector<int64_t>& counts :
       {std::vector<int64_t>{10}, {1, 2, 3, 4}, {3, 0, 7}, {9, 1}}) {
    SampleBuffer all, newest({.capacity = 4});
    int64_t seen = 0;
    for (const int64_t count : counts) {
      add(all, seen, count);
      add(newest, seen, count);
      seen += count;
      EXPECT_EQ(kept_by(all), range(0, seen));
      EXPECT_EQ(kept_by(newest), range(std::max<int64_t>(0, seen - 4), std::min<int64_t>(seen, 4)));
    }
    EXPECT_EQ(newest.seen(), 10);
  }
}

TEST(SampleBuffer, AReservoirKeepsEachSampleWithEqualProbability) {
  constexpr int64_t kCapacity = 10, kSamples = 40, kRuns = 400;
  std::vector<int> kept(kSamples);
  for (uint64_t seed = 0; seed < kRuns; ++seed) {
    SampleBuffer buffer({.capacity = kCapacity, .keep = KeptSamples::reservoir, .seed = seed});
    for (int64_t i = 0; i < kSamples; i += 8) add(buffer, i, 8);
    const auto numbers = kept_by(buffer);
    EXPECT_EQ(numbers.size(), static_cast<size_t>(kCapacity));
    for (const int64_t number : numbers) ++kept[static_cast<size_t>(number)];
  }
  // 100 of 400 are expected, with a standard deviation of 8.7; the seeds are fixed.
  for (const int count : kept) EXPECT_NEAR(count, 100, 35);
}

TEST(SampleBuffer, DrawsDifferentSamplesInASeededOrder) {
  SampleBuffer a({.seed = 1}), same({.seed = 1}), other({.seed = 2});
  EXPECT_FALSE(a.draw(3).inputs.defined());
  for (auto* buffer : {&a, &same, &other}) add(*buffer, 0, 20);
  SampleBuffer fresh({.seed = 1});
  std::set<std::vector<int64_t>> batches;
  const auto ignored = same.draw(0);  // counts as a draw
  for (int i = 0; i < 5; ++i) {
    const auto drawn = numbers_of(a.draw(6));
    EXPECT_EQ(std::set<int64_t>(drawn.begin(), drawn.end()).size(), 6u);
    batches.insert(drawn);
    batches.insert(numbers_of(other.draw(6)));
  }
  EXPECT_EQ(batches.size(), 10u);
  EXPECT_EQ(a.draw(50).inputs.size(0), 20);
}

TEST(SampleBuffer, AResumedBufferGoesOnWithTheSameBatches) {
  for (const auto& options :
       {SampleBufferOptions{}, {.capacity = 6}, {.capacity = 6, .keep = KeptSamples::reservoir}}) {
    SampleBuffer straight(options), resumed(options);
    add(straight, 0, 9);
    straight.draw(4);
    const auto state = straight.state();
    add(straight, 9, 5);  // does not change the state
    resumed.load_state(state);
    add(resumed, 9, 5);
    for (int i = 0; i < 3; ++i)
      EXPECT_EQ(numbers_of(straight.draw(4)), numbers_of(resumed.draw(4)));
    EXPECT_EQ(straight.seen(), resumed.seen());
  }
}

TEST(SampleBuffer, WrongInputIsAnError) {
  EXPECT_EQ(thrown_by([] { SampleBuffer buffer({.capacity = -1}); }),
            "SampleBuffer: capacity is -1; expected 0 or more");
  EXPECT_EQ(
      thrown_by([] { SampleBuffer buffer({.keep = KeptSamples::reservoir}); }),
      "SampleBuffer: a reservoir with capacity 0; expected a capacity, or the newest samples");
  SampleBuffer buffer;
  add(buffer, 0, 3);
  const Batch batch = numbered(0, 3);
  EXPECT_EQ(thrown_by([&] { buffer.add(batch.inputs.narrow(1, 0, 1), batch.targets); }),
            "SampleBuffer.add: inputs of one sample are Float [1]; expected Float [2], as in the "
            "first call");
  EXPECT_EQ(thrown_by([&] { buffer.add(batch.inputs, batch.targets.to(at::kDouble)); }),
            "SampleBuffer.add: targets of one sample are Double [1]; expected Float [1], as in the "
            "first call");
  EXPECT_EQ(thrown_by([&] { buffer.add(batch.inputs); }),
            "SampleBuffer.add: targets of one sample are none; expected Float [1], as in the first "
            "call");
  EXPECT_EQ(thrown_by([&] { buffer.add(batch.inputs, batch.targets.narrow(0, 0, 2)); }),
            "SampleBuffer.add: 3 inputs and 2 targets; expected as many targets");
  EXPECT_EQ(thrown_by([&] { buffer.draw(-1); }),
            "SampleBuffer.draw: count is -1; expected 0 or more");
  SampleBuffer smaller({.capacity = 2});
  EXPECT_NE(thrown_by([&] { smaller.load_state(buffer.state()); }).find("the capacity is 2"),
            std::string::npos);
  EXPECT_NE(thrown_by([&] { smaller.load_state({}); }).find("no tensor counters"),
            std::string::npos);
  EXPECT_EQ(buffer.size(), 3);
}

}  // namespace
}  // namespace tessera
