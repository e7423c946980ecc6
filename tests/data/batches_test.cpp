// Which tokens make up which batch: checked against the contract's formula, written out again here.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "data/permutation.h"
#include "tessera/data.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using testing::HasSubstr;
using Order = BatchOptions::Order;

Tokens counting(int64_t size) {
  std::vector<uint16_t> tokens(static_cast<size_t>(size));
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<uint16_t>(i);
  }
  return Tokens::from(tokens, "counting");
}

TEST(TokenBatches, SequentialFollowsTheContract) {
  // Lengths that divide evenly, that wrap inside a sequence, and one that is shorter than a batch.
  for (const int64_t length : {int64_t{97}, int64_t{101}, int64_t{1000}, int64_t{9}}) {
    const int64_t seq = 8, global = 6;
    const TokenBatches batches(counting(length), {seq, global, Order::sequential, 0});
    for (const int world : {1, 2, 3, 6}) {
      for (int64_t step = 0; step < 40; ++step) {
        for (int rank = 0; rank < world; ++rank) {
          const Batch batch = batches.batch(step, rank, world);
          ASSERT_EQ(batch.inputs.sizes(), at::IntArrayRef({global / world, seq}));
          for (int64_t row = 0; row < global / world; ++row) {
            const int64_t i = step * global + rank * (global / world) + row;
            for (int64_t k = 0; k < seq; ++k) {
              const int64_t p = (i * seq + k) % (length - 1);
              ASSERT_EQ(batch.inputs[row][k].item<int64_t>(), p) << length << " " << step << " " << rank;
              ASSERT_EQ(batch.targets[row][k].item<int64_t>(), p + 1);
            }
          }
        }
      }
    }
  }
}

TEST(TokenBatches, SequentialNeverOverflows) {
  const TokenBatches batches(counting(100), {7, 1, Order::sequential, 0});
  const int64_t step = int64_t{1} << 61;
  // 2^61 mod 99 by repeated doubling.
  int64_t residue = 1;
  for (int i = 0; i < 61; ++i) {
    residue = residue * 2 % 99;
  }
  EXPECT_EQ(batches.batch(step, 0, 1).inputs[0][0].item<int64_t>(), residue * 7 % 99);
}

// The starts of `count` sequences from number `from` on, taken with one batch size and world.
std::vector<int64_t> starts(int64_t length, int64_t count, int64_t global, int world, uint64_t seed, int64_t seq = 4) {
  const TokenBatches batches(counting(length), {seq, global, Order::shuffled, seed});
  std::vector<int64_t> result;
  for (int64_t step = 0; static_cast<int64_t>(result.size()) < count; ++step) {
    for (int rank = 0; rank < world; ++rank) {
      const Batch batch = batches.batch(step, rank, world);
      for (int64_t row = 0; row < batch.inputs.size(0); ++row) {
        result.push_back(batch.inputs[row][0].item<int64_t>());
        EXPECT_EQ(batch.targets[row][seq - 1].item<int64_t>(), result.back() + seq);
      }
    }
  }
  result.resize(static_cast<size_t>(count));
  return result;
}

TEST(TokenBatches, ShuffledIsAPermutationOfTheWindowsEachEpoch) {
  const int64_t windows = 103;
  const std::vector<int64_t> order = starts(windows * 4 + 3, 2 * windows, 6, 1, 5);
  const std::set<int64_t> first(order.begin(), order.begin() + windows), second(order.begin() + windows, order.end());
  EXPECT_EQ(first.size(), static_cast<size_t>(windows));
  EXPECT_EQ(second.size(), static_cast<size_t>(windows));
  for (const int64_t start : first) {
    EXPECT_EQ(start % 4, 0);
  }
  EXPECT_FALSE(std::equal(order.begin(), order.begin() + windows, order.begin() + windows))
      << "epochs in the same order";
  EXPECT_FALSE(std::is_sorted(order.begin(), order.begin() + windows));
}

TEST(TokenBatches, ShuffledDependsOnSeedAloneNotOnTheWorld) {
  const std::vector<int64_t> alone = starts(401, 240, 12, 1, 7);
  EXPECT_EQ(alone, starts(401, 240, 12, 2, 7));
  EXPECT_EQ(alone, starts(401, 240, 12, 4, 7));
  EXPECT_EQ(alone, starts(401, 240, 6, 3, 7));
  EXPECT_NE(alone, starts(401, 240, 12, 1, 8));
}

TEST(Permutation, IsOneForEverySizeAndLooksRandom) {
  for (uint64_t size = 1; size < 200; ++size) {
    std::set<uint64_t> seen;
    for (uint64_t i = 0; i < size; ++i) {
      const uint64_t image = permuted(i, size, size * 77);
      ASSERT_LT(image, size);
      seen.insert(image);
    }
    ASSERT_EQ(seen.size(), size);
  }
  // Where each element of 16 lands, over many keys: about evenly.
  int counts[16][16] = {};
  for (uint64_t key = 0; key < 4000; ++key) {
    for (uint64_t i = 0; i < 16; ++i) {
      ++counts[i][permuted(i, 16, mixed(key))];
    }
  }
  for (const auto& row : counts) {
    for (const int count : row) {
      EXPECT_NEAR(count, 250, 100);
    }
  }
}

TEST(TokenBatches, RefusesWhatCannotBe) {
  const auto message = [](auto function) -> std::string {
    try {
      function();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "nothing thrown";
  };
  EXPECT_THAT(message([] {
                TokenBatches(counting(8), {8, 2});
              }),
              HasSubstr("counting: 8 tokens are too few for seq_len 8"));
  EXPECT_EQ(message([] { TokenBatches(counting(9), {8, 2}); }), "nothing thrown");
  EXPECT_THAT(message([] { TokenBatches(Tokens(), {8, 2}); }), HasSubstr("0 tokens"));
  EXPECT_THAT(message([] { TokenBatches(counting(9), {0, 2}); }), HasSubstr("seq_len is 0"));
  EXPECT_THAT(message([] { TokenBatches(counting(9), {8, 0}); }), HasSubstr("global_batch is 0"));
  EXPECT_THAT(message([] { TokenBatches(counting(9), {8, 4}).batch(0, 0, 3); }), HasSubstr("3 ranks do not divide"));
  EXPECT_THAT(message([] { TokenBatches(counting(9), {8, 4}).batch(0, 2, 2); }), HasSubstr("rank 2 of 2"));
}

TEST(WindowBatch, CoversEveryWholeWindowOnce) {
  const Tokens tokens = counting(35);  // 34 positions with a successor: 6 windows of 5, 4 left over
  ASSERT_EQ(window_count(tokens, 5), 6);
  const Batch first = window_batch(tokens, 5, 0, 4), rest = window_batch(tokens, 5, 4, 4);
  EXPECT_EQ(first.inputs.size(0), 4);
  EXPECT_EQ(rest.inputs.size(0), 2);
  EXPECT_TRUE(at::equal(at::cat({first.inputs, rest.inputs}).flatten(), at::arange(30)));
  EXPECT_TRUE(at::equal(at::cat({first.targets, rest.targets}).flatten(), at::arange(1, 31)));
  EXPECT_THROW(window_batch(tokens, 5, 6, 1), UsageError);
  EXPECT_THROW(window_batch(counting(5), 5, 0, 1), UsageError);
}

TEST(Bigram, EqualsTheSumWrittenOut) {
  // train 0 1 0 1 0 2: n(0)=3 with 0→1 twice and 0→2 once, n(1)=2 with 1→0 twice. val 0 1 2 0.
  const Tokens train = Tokens::from({0, 1, 0, 1, 0, 2}), val = Tokens::from({0, 1, 2, 0});
  double best = 1e9;
  for (const double k : {1.0, 0.1, 0.01, 0.001}) {
    const double sum =
        std::log((2 + k) / (3 + 3 * k)) + std::log((0 + k) / (2 + 3 * k)) + std::log((0 + k) / (0 + 3 * k));
    best = std::min(best, -sum / 3);
  }
  EXPECT_NEAR(bigram_cross_entropy(train, val, 3), best, 1e-12);
  EXPECT_THROW(bigram_cross_entropy(train, Tokens::from({1}), 3), UsageError);
  EXPECT_THROW(bigram_cross_entropy(train, val, 2), UsageError);
}

}  // namespace
}  // namespace tessera
