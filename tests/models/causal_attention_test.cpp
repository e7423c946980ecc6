// Attention in blocks against the plain formula, and its gradients against finite differences.

#include "models/causal_attention.h"

#include <cmath>
#include <limits>

#include <gmock/gmock.h>

#include "harness/thrown_by.h"
#include "models/drawn.h"

namespace tessera::testing {
namespace {

at::Tensor plain_weights(const at::Tensor& q, const at::Tensor& k) {
  const at::Tensor scores =
      at::matmul(q, k.transpose(-1, -2)) / std::sqrt(static_cast<double>(q.size(-1)));
  const at::Tensor later = at::ones({q.size(-2), q.size(-2)}, at::kBool).triu(1);
  return at::softmax(scores.masked_fill(later, -std::numeric_limits<double>::infinity()), -1);
}

struct AttentionInputs {
  explicit AttentionInputs(at::IntArrayRef shape, at::ScalarType type = at::kDouble)
      : q(drawn(shape, type, 1)), k(drawn(shape, type, 2)), v(drawn(shape, type, 3)) {}
  std::vector<at::Tensor> gradients(const at::Tensor& out) {
    const at::Tensor outer = drawn(out.sizes(), out.scalar_type(), 4).detach();
    return torch::autograd::grad({(out * outer).sum()}, {q, k, v});
  }
  at::Tensor q, k, v;
};

const std::vector<AttentionBlocks> kBlocks{{1, 1}, {3, 5}, {5, 3}, {4, 16}, {16, 4}, {128, 256}};

TEST(CausalAttention, BlocksEqualThePlainFormula) {
  for (const int64_t length : {1, 4, 13, 32}) {
    AttentionInputs in({3, length, 6});
    const at::Tensor expected = at::matmul(plain_weights(in.q, in.k), in.v);
    const auto gradients = in.gradients(expected);
    for (const auto& blocks : kBlocks) {
      SCOPED_TRACE(::testing::Message() << length << " in " << blocks.queries << blocks.keys);
      const at::Tensor out = blockwise_attention(in.q, in.k, in.v, 0, blocks);
      expect_close(out, expected, 1e-12);
      const auto ours = in.gradients(out);
      for (size_t i = 0; i < 3; ++i) expect_close(ours[i], gradients[i], 1e-12);
    }
  }
}

TEST(CausalAttention, Float32AndBfloat16AreWithinRounding) {
  for (const auto& [type, bound] : {std::pair(at::kFloat, 1e-5), std::pair(at::kBFloat16, 0.1)}) {
    AttentionInputs exact({2, 70, 16}), in({2, 70, 16}, type);
    const at::Tensor expected = at::matmul(plain_weights(exact.q, exact.k), exact.v);
    const auto gradients = exact.gradients(expected);
    const at::Tensor out = blockwise_attention(in.q, in.k, in.v, 0, {32, 16});
    EXPECT_EQ(out.scalar_type(), type);
    expect_close(out, expected, bound);
    const auto ours = in.gradients(out);
    for (size_t i = 0; i < 3; ++i) expect_close(ours[i], gradients[i], 3 * bound);
  }
}

// Equal scores for all keys, of which the last quarter has the value 1. In bfloat16 a sum of ones
// ends at 256.
TEST(CausalAttention, Bfloat16SumsInFloat32) {
  const at::Tensor q = at::zeros({1, 400, 4}, at::kBFloat16), v = q.clone();
  v.slice(1, 300, 400).fill_(1);
  const at::Tensor out = blockwise_attention(q, q, v, 0, {400, 1});
  EXPECT_NEAR(out[0][399][0].item<double>(), 0.25, 0.002);
}

// Scores far above the range of exp(): each block's largest score must be subtracted.
TEST(CausalAttention, LargeScoresDoNotOverflow) {
  AttentionInputs in({1, 9, 4}, at::kFloat);
  const at::Tensor q = in.q * 100, k = in.k * 100;
  expect_close(blockwise_attention(q, k, in.v, 0, {2, 2}), at::matmul(plain_weights(q, k), in.v),
               1e-5);
}

// Below, at and above the length up to which all scores are computed, in blocks that do not divide
// it.
TEST(CausalAttention, TheChosenKernelEqualsThePlainFormula) {
  for (const int64_t length : {kWholeScoresLength, kWholeScoresLength + 1, int64_t{523}}) {
    AttentionInputs in({2, length, 8});
    const at::Tensor expected = at::matmul(plain_weights(in.q, in.k), in.v);
    const at::Tensor out = causal_attention(in.q, in.k, in.v, 0);
    EXPECT_EQ(out.grad_fn()->name() == "BmmBackward0", length <= kWholeScoresLength) << length;
    expect_close(out, expected, 1e-12);
    const auto gradients = in.gradients(expected), ours = in.gradients(out);
    for (size_t i = 0; i < 3; ++i) expect_close(ours[i], gradients[i], 1e-11);
  }
}

// With v = 1 in one column and the identity in the others, the result shows which weights are kept.
TEST(CausalAttention, DropoutKeepsTheMeanAndItsGradientUsesTheSameMask) {
  const int64_t length = 40;
  AttentionInputs in({64, length, length});
  const at::Tensor eye = at::eye(length, at::kDouble).expand({64, length, length}).contiguous();
  const auto run = [&] {
    torch::manual_seed(5);
    return blockwise_attention(in.q, in.k, eye, 0.25, {16, 8});
  };
  const at::Tensor used = run(), weights = plain_weights(in.q, in.k);
  EXPECT_TRUE(at::equal(used, run())) << "depends on the default generator alone";
  const at::Tensor kept = used.ne(0);
  expect_close(used, weights * kept / 0.75, 1e-12);
  const double share =
      kept.sum().item<double>() / static_cast<double>(64 * length * (length + 1) / 2);
  EXPECT_NEAR(share, 0.75, 0.01);
  EXPECT_FALSE(at::equal(kept[0], kept[1])) << "heads have masks of their own";
  const at::Tensor rows = kept.slice(1, 16, 32);
  EXPECT_FALSE(at::equal(rows.slice(2, 0, 8), rows.slice(2, 8, 16))) << "and so have blocks";
  // The mask is known now, so the gradients of the plain formula with it are too.
  torch::manual_seed(5);
  const auto ours = in.gradients(blockwise_attention(in.q, in.k, in.v, 0.25, {16, 8}));
  const auto expected = in.gradients(at::matmul(weights * kept / 0.75, in.v));
  for (size_t i = 0; i < 3; ++i) expect_close(ours[i], expected[i], 1e-11);
}

TEST(CausalAttention, GradientsEqualFiniteDifferences) {
  AttentionInputs in({2, 11, 3});
  const auto value = [&] {
    torch::manual_seed(8);
    const at::Tensor out = blockwise_attention(in.q, in.k, in.v, 0.3, {4, 3});
    return (out * out).sum();
  };
  const auto gradients = torch::autograd::grad({value()}, {in.q, in.k, in.v});
  const torch::NoGradGuard no_grad;
  const std::vector<at::Tensor> inputs{in.q, in.k, in.v};
  for (size_t i = 0; i < 3; ++i) {
    const at::Tensor flat = inputs[i].view({-1}), expected = gradients[i].reshape({-1});
    for (int64_t j = 0; j < flat.numel(); ++j) {
      const double before = flat[j].item<double>(), step = 1e-6;
      flat[j] = before + step;
      const double above = value().item<double>();
      flat[j] = before - step;
      const double below = value().item<double>();
      flat[j] = before;
      ASSERT_NEAR((above - below) / (2 * step), expected[j].item<double>(), 1e-7) << i << " " << j;
    }
  }
}

TEST(CausalAttention, RefusesASecondDerivative) {
  AttentionInputs in({1, 4, 2});
  EXPECT_THAT(thrown_by([&] {
                torch::autograd::grad({blockwise_attention(in.q, in.k, in.v, 0).sum()}, {in.q}, {},
                                      true, true);
              }),
              ::testing::HasSubstr("attention: this backward has create_graph"));
}

}  // namespace
}  // namespace tessera::testing
