// A dataset of token sequences: its own contract. TokenBatches, which is made of it, is checked in batches_test.cpp.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "data/folder.h"
#include "tessera/data.h"

namespace tessera {
namespace {

using testing::HasSubstr;

Tokens first_numbers(int64_t size) {
  std::vector<uint16_t> tokens(static_cast<size_t>(size));
  std::iota(tokens.begin(), tokens.end(), uint16_t{0});
  return Tokens::from(tokens, "numbers");
}

TEST(TokenDataset, WindowsBeginAnewAndAContinuousOneGoesOn) {
  const TokenDataset windows(first_numbers(12), 4, false), on(first_numbers(12), 4, true);
  EXPECT_EQ(windows.size(), 2);  // 11 positions with a successor
  EXPECT_EQ(on.size(), 2);
  EXPECT_EQ(windows.tokens_per_sample(), 4);
  EXPECT_TRUE(at::equal(windows.get({0, 1, 2, 5}).inputs.select(1, 0), at::tensor({0, 4, 0, 4}, at::kLong)));
  const Batch batch = on.get({1, 2, 3, 5});
  EXPECT_TRUE(at::equal(batch.inputs, at::tensor({4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 9, 10, 0, 1}).view({4, 4})));
  EXPECT_TRUE(at::equal(batch.targets, batch.inputs + 1));
  EXPECT_TRUE(batch.extra.empty());
}

TEST(TokenDataset, SequencesLongerThanHalfTheTextWrapOften) {
  const TokenDataset dataset(first_numbers(4), 3, true);
  for (int64_t sample = 0; sample < 9; ++sample) {
    EXPECT_TRUE(at::equal(dataset.get({sample}).inputs[0], (at::arange(3) + sample * 3) % 3));
  }
}

TEST(TokenDataset, NoSamplesNoRowsAndNegativeOnesAreRefused) {
  const TokenDataset dataset(first_numbers(12), 4, false);
  EXPECT_EQ(dataset.get({}).inputs.sizes(), at::IntArrayRef({0, 4}));
  EXPECT_THAT(refusal_of([&] { dataset.get({0, -1}); }), HasSubstr("sample -1"));
  EXPECT_THAT(refusal_of([] { TokenDataset(first_numbers(4), 4, true); }), HasSubstr("numbers: 4 tokens are too few"));
  EXPECT_THAT(refusal_of([] { TokenDataset(first_numbers(4), 0, true); }), HasSubstr("seq_len is 0"));
  EXPECT_THAT(dataset.describe(), HasSubstr("numbers: 12 tokens, 2 sequences of 4"));
}

}  // namespace
}  // namespace tessera
