// What a step of GPT-2 needs in memory: neither the scores of all pairs of tokens nor the logits of
// all tokens. The formulas are those of docs/memory.md.

#include <cstdio>
#include <optional>

#include <gmock/gmock.h>

#include "harness/memory.h"
#include "models/causal_attention.h"
#include "tessera/models/gpt2.h"

namespace tessera::testing {
namespace {

[[maybe_unused]] const bool kFreedIsReturned = return_freed_blocks();

constexpr int64_t kChunk = 32 * kMiB;  // of logits

/// The most memory that `step` needs beside what is there before, after a first run of it.
template <class Step>
int64_t peak_of(const Step& step) {
  step();
  const int64_t before = resident_bytes();
  reset_peak();
  step();
  return peak_bytes() - before;
}

GPT2Options options_of(int64_t length, int64_t vocabulary, int64_t width, int64_t heads,
                       int64_t layers) {
  GPT2Options options;
  options.vocab_size = vocabulary;
  options.n_positions = length;
  options.n_embd = width;
  options.n_head = heads;
  options.n_layer = layers;
  return options;
}

at::Tensor some_tokens(int64_t batch, int64_t length, int64_t vocabulary) {
  return (at::arange(batch * length) * 17 % vocabulary).view({batch, length});
}

TEST(Gpt2Memory, TheLossHoldsOneChunkOfLogits) {
  const int64_t length = 2048, vocabulary = 20011, width = 32;
  GPT2 net(options_of(length, vocabulary, width, 2, 1));
  const at::Tensor tokens = some_tokens(1, length, vocabulary), targets = (tokens + 7) % vocabulary;
  const auto chunked = peak_of([&] {
    net->zero_grad();
    net->loss(tokens, targets).backward();
  });
  const auto whole = peak_of([&] {
    net->zero_grad();
    at::cross_entropy_loss(net->forward(tokens).view({-1, vocabulary}), targets.view({-1}))
        .backward();
  });
  // Gradients of the embedding from both of its uses, one chunk of logits, 8 MiB for the rest.
  const int64_t logits = length * vocabulary * 4,
                bound = 2 * vocabulary * width * 4 + kChunk + 8 * kMiB;
  std::printf("logits %ld MiB; peak of a step %ld MiB of %ld allowed; with all logits %ld MiB\n",
              logits / kMiB, chunked / kMiB, bound / kMiB, whole / kMiB);
  EXPECT_LT(chunked, bound);
  EXPECT_LT(bound, logits);
  EXPECT_GT(whole, 2 * logits) << "this test does not see all logits";
}

// [Note: gradient of a tied embedding] in gpt2.cpp. One of its own would make the sum a third one.
TEST(Gpt2Memory, ALargeTiedEmbeddingHasOneGradient) {
  const int64_t length = 512, vocabulary = 40001, width = 512;
  auto options = options_of(length, vocabulary, width, 2, 1);
  GPT2 net(options);
  const at::Tensor tokens = some_tokens(1, length, vocabulary), targets = (tokens + 7) % vocabulary;
  const auto step = [&] {
    net->zero_grad();
    net->loss(tokens, targets).backward();
  };
  const int64_t gradient = vocabulary * width * 4;
  EXPECT_LT(peak_of(step), gradient + 2 * kChunk + 32 * kMiB);

  options.tie_word_embeddings = false;
  GPT2 untied(options);
  const at::NoGradGuard no_grad;
  for (const auto& item : net->named_parameters())
    untied->named_parameters()[item.key()].copy_(item.value());
  untied->named_parameters()["lm_head.weight"].copy_(
      net->named_parameters()["transformer.wte.weight"]);
  {
    const at::AutoGradMode with_grad(true);
    untied->loss(tokens, targets).backward();
  }
  const auto sum = untied->named_parameters()["transformer.wte.weight"].grad() +
                   untied->named_parameters()["lm_head.weight"].grad();
  const auto tied = net->named_parameters()["transformer.wte.weight"].grad();
  EXPECT_EQ(tied.layout(), at::kStrided);
  EXPECT_TRUE(at::allclose(tied, sum, 1e-5, 1e-8));
}

// With the larger vocabulary a chunk has not all classes.
TEST(Gpt2Memory, EvaluationHoldsOneOrTwoChunksOfLogits) {
  // A chunk of the second has not all classes.
  for (const auto& [length, vocabulary, chunks] : {std::tuple(2048, 20011, 1), {512, 140000, 2}}) {
    GPT2 net(options_of(length, vocabulary, 32, 2, 1));
    const at::Tensor tokens = some_tokens(1, length, vocabulary);
    const torch::NoGradGuard no_grad;
    EXPECT_LT(peak_of([&] { net->loss(tokens, tokens); }), chunks * kChunk + 16 * kMiB)
        << vocabulary;
  }
}

TEST(Gpt2Memory, AttentionHoldsAFewBlocksOfScores) {
  const int64_t length = 2048, heads = 4, width = 16;
  const auto input = [&] { return at::randn({heads, length, width}).requires_grad_(); };
  const at::Tensor q = input(), k = input(), v = input();
  for (const double dropout : {0.0, 0.1}) {
    const auto peak = peak_of([&] { causal_attention(q, k, v, dropout).sum().backward(); });
    // Fifteen tensors like the inputs, four blocks of scores (five with dropout), 8 MiB.
    const AttentionBlocks blocks;
    const int64_t all = heads * length * length * 4,
                  bound = 15 * heads * length * width * 4 +
                          5 * heads * blocks.queries * blocks.keys * 4 + 8 * kMiB;
    std::printf("scores %ld MiB; peak of a step %ld MiB of %ld allowed\n", all / kMiB, peak / kMiB,
                bound / kMiB);
    EXPECT_LT(peak, bound);
    EXPECT_LT(bound, all);
  }
}

struct Saved {
  int64_t length, batch;
  std::optional<int64_t> checkpointed_every;
  std::string name;
};
class Gpt2SavedMemory : public ::testing::TestWithParam<Saved> {};

/// What forward keeps for backward.
int64_t bytes_kept(const GPT2Options& options, const at::Tensor& tokens) {
  GPT2 net(options);
  net->loss(tokens, tokens);
  const int64_t before = resident_bytes();
  const at::Tensor loss = net->loss(tokens, tokens);
  return resident_bytes() - before;
}

TEST_P(Gpt2SavedMemory, OfABlockFollowsTheFormula) {
  const auto& [length, batch, every, name] = GetParam();
  const int64_t width = 64, heads = 4, few = 2, many = 8;
  const auto kept = [&](int64_t layers) {
    GPT2Options options = options_of(length, 64, width, heads, layers);
    options.activation_checkpointing = every.has_value();
    options.activation_checkpointing_every = every.value_or(1);
    return bytes_kept(options, some_tokens(batch, length, 64));
  };
  const double counted = static_cast<double>(kept(many) - kept(few)) / (many - few);
  const int64_t row =
      length <= kWholeScoresLength ? 16 * width + heads * length : 17 * width + heads;
  const double stored = 4.0 * batch * length * row, inputs = 4.0 * batch * length * width;
  const double share = every ? 1.0 / static_cast<double>(*every) : 0;
  const double expected = share * inputs + (1 - share) * stored;
  std::printf("%ld tokens of sequences of %ld: a block keeps %.2f MiB, by the formula %.2f MiB\n",
              batch * length, length, counted / kMiB, expected / kMiB);
  EXPECT_NEAR(counted, expected, 0.05 * expected);
}

INSTANTIATE_TEST_SUITE_P(Lengths, Gpt2SavedMemory,
                         ::testing::Values(Saved{1024, 4, {}, "blocks"},
                                           Saved{256, 16, {}, "whole_scores"},
                                           Saved{1024, 4, 1, "checkpointed"},
                                           Saved{1024, 4, 2, "every_second_checkpointed"}),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace tessera::testing
