// The tokens of each sequence, compared with the formula in token_dataset.h.

#include "tessera/data/token_dataset.h"

#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/thrown_by.h"
#include "tessera/data/sampler.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::thrown_by;

Tokens first_numbers(int64_t size) {
  std::vector<uint16_t> tokens(static_cast<size_t>(size));
  std::iota(tokens.begin(), tokens.end(), uint16_t{0});
  return Tokens::from(tokens, "numbers");
}

TEST(TokenDataset, BeyondTheEndWindowsRepeatAndAContinuousStreamWrapsAround) {
  const TokenDataset windows(first_numbers(12), 4, false), on(first_numbers(12), 4, true);
  EXPECT_EQ(windows.size(), 2);  // 11 positions with a successor
  EXPECT_EQ(on.size(), 2);
  EXPECT_EQ(windows.tokens_per_sample(), 4);
  EXPECT_TRUE(at::equal(windows.get({0, 1, 2, 5}).inputs.select(1, 0),
                        at::tensor({0, 4, 0, 4}, at::kLong)));
  const Batch batch = on.get({1, 2, 3, 5});
  EXPECT_TRUE(at::equal(
      batch.inputs, at::tensor({4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 9, 10, 0, 1}).view({4, 4})));
  EXPECT_TRUE(at::equal(batch.targets, batch.inputs + 1));
  EXPECT_TRUE(batch.extra.empty());
}

TEST(TokenDataset, AContinuousStreamFollowsTheFormula) {
  // Lengths that are a multiple of the sequence length, that wrap inside a sequence, and that are
  // shorter than a batch.
  for (const int64_t length : {int64_t{97}, int64_t{101}, int64_t{1000}, int64_t{9}}) {
    const int64_t seq = 8, count = 6;
    const TokenDataset dataset(first_numbers(length), seq, true);
    for (int64_t first = 0; first < 240; first += count) {
      const Batch batch =
          dataset.get(Sampler(dataset.size(), SampleOrder::sequential).samples(first, count));
      ASSERT_EQ(batch.inputs.sizes(), at::IntArrayRef({count, seq}));
      for (int64_t row = 0; row < count; ++row) {
        for (int64_t k = 0; k < seq; ++k) {
          const int64_t p = ((first + row) * seq + k) % (length - 1);
          ASSERT_EQ(batch.inputs[row][k].item<int64_t>(), p)
              << length << " " << first << " " << row;
          ASSERT_EQ(batch.targets[row][k].item<int64_t>(), p + 1);
        }
      }
    }
  }
}

TEST(TokenDataset, LargeSampleNumbersDoNotOverflow) {
  const TokenDataset dataset(first_numbers(100), 7, true);
  // 2^61 mod 99 by repeated doubling.
  int64_t residue = 1;
  for (int i = 0; i < 61; ++i) residue = residue * 2 % 99;
  EXPECT_EQ(dataset.get({int64_t{1} << 61}).inputs[0][0].item<int64_t>(), residue * 7 % 99);
}

TEST(TokenDataset, AnEpochVisitsEveryWindowOnce) {
  const TokenDataset windows(first_numbers(35), 5,
                             false);  // 34 positions with a successor: 6 windows of 5, 4 left over
  ASSERT_EQ(windows.size(), 6);
  for (const SampleOrder order : {SampleOrder::sequential, SampleOrder::shuffled}) {
    const Batch batch = windows.get(Sampler(6, order, 7).samples(6, 6));
    EXPECT_TRUE(at::equal(std::get<0>(batch.inputs.flatten().sort()), at::arange(30)));
    EXPECT_TRUE(at::equal(batch.targets, batch.inputs + 1));
  }
}

TEST(TokenDataset, SequencesLongerThanHalfTheTextWrapOften) {
  const TokenDataset dataset(first_numbers(4), 3, true);
  for (int64_t sample = 0; sample < 9; ++sample)
    EXPECT_TRUE(at::equal(dataset.get({sample}).inputs[0], (at::arange(3) + sample * 3) % 3));
}

TEST(TokenDataset, NoSamplesGiveNoRowsAndFaultyArgumentsAreRefused) {
  const TokenDataset dataset(first_numbers(12), 4, false);
  EXPECT_EQ(dataset.get({}).inputs.sizes(), at::IntArrayRef({0, 4}));
  EXPECT_THAT(thrown_by([&] { dataset.get({0, -1}); }), HasSubstr("sample -1"));
  EXPECT_THAT(thrown_by([] { TokenDataset(first_numbers(4), 4, true); }),
              HasSubstr("numbers: 4 tokens are too few"));
  EXPECT_EQ(thrown_by([] { TokenDataset(first_numbers(5), 4, true); }), "no error");
  EXPECT_THAT(thrown_by([] { TokenDataset(Tokens(), 4, true); }), HasSubstr("0 tokens"));
  EXPECT_THAT(thrown_by([] { TokenDataset(first_numbers(4), 0, true); }),
              HasSubstr("seq_len is 0"));
  EXPECT_THAT(dataset.describe(), HasSubstr("numbers: 12 tokens, 2 sequences of 4"));
}

}  // namespace
}  // namespace tessera
