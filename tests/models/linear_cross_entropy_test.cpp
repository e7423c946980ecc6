// The loss in chunks against at::cross_entropy_loss of all logits.

#include "models/linear_cross_entropy.h"

#include <cmath>

#include <gmock/gmock.h>

#include "harness/thrown_by.h"
#include "models/drawn.h"
#include "tessera/detail/torch_compat.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

struct LossInputs {
  LossInputs(int64_t tokens, int64_t classes, at::ScalarType type = at::kDouble)
      : rows(drawn({tokens, 7}, type, 1)),
        weight(drawn({classes, 7}, type, 2)),
        targets(at::randint(classes, {tokens}, at::detail::createCPUGenerator(3),
                            at::TensorOptions(at::kLong))) {}
  at::Tensor plain() const { return at::cross_entropy_loss(at::linear(rows, weight), targets); }
  at::Tensor rows, weight, targets;
};

void expect_equal(const LossInputs& in, const CrossEntropyChunks& chunks, double bound) {
  SCOPED_TRACE(::testing::Message() << chunks.tokens << " tokens, " << chunks.classes);
  const at::Tensor expected = in.plain() * 3,
                   loss = chunked_cross_entropy(in.rows, in.weight, in.targets, chunks) * 3;
  expect_close(loss, expected, 3 * bound);
  const auto ours = torch::autograd::grad({loss}, {in.rows, in.weight}),
             theirs = torch::autograd::grad({expected}, {in.rows, in.weight});
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(ours[i].scalar_type(), in.rows.scalar_type());
    expect_close(ours[i], theirs[i], 3 * bound);
  }
}

// Chunks that divide neither the tokens nor the classes, single ones, and larger than everything.
const std::vector<CrossEntropyChunks> kChunks{{1, 1},   {5, 11},  {4, 1000},   {1000, 4},
                                              {23, 31}, {22, 30}, {128, 65536}};

TEST(LinearCrossEntropy, EqualsTheLossOfAllLogits) {
  const LossInputs in(23, 31);
  for (const auto& chunks : kChunks) expect_equal(in, chunks, 1e-13);
  expect_equal(LossInputs(1, 1), {128, 65536}, 1e-13);
}

TEST(LinearCrossEntropy, Float32IsWithinRounding) {
  const LossInputs in(300, 500, at::kFloat);
  for (const auto& chunks : kChunks)
    if (chunks.classes > 1) expect_equal(in, chunks, 2e-6);  // a sum of 500 parts rounds more
}

// Compared with float64: plain bfloat16 rounds the logits' gradients too.
TEST(LinearCrossEntropy, Bfloat16SumsInFloat32) {
  LossInputs in(40, 50, at::kBFloat16);
  LossInputs exact(40, 50);
  exact.rows = in.rows.detach().to(at::kDouble).requires_grad_();
  exact.weight = in.weight.detach().to(at::kDouble).requires_grad_();
  const at::Tensor loss = chunked_cross_entropy(in.rows, in.weight, in.targets, {7, 9});
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  expect_close(loss, exact.plain(), 0.02);
  const auto ours = torch::autograd::grad({loss}, {in.rows, in.weight}),
             theirs = torch::autograd::grad({exact.plain()}, {exact.rows, exact.weight});
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(ours[i].scalar_type(), at::kBFloat16);
    expect_close(ours[i], theirs[i], 0.01 * theirs[i].abs().max().item<double>());
  }
}

TEST(LinearCrossEntropy, IgnoredTargetsDoNotCount) {
  LossInputs in(23, 31);
  in.targets.index_put_({at::arange(0, 23, 3)}, at::scalar_tensor(-100, at::kLong));
  in.targets.slice(0, 5, 10).fill_(-100);  // a whole chunk
  for (const auto& chunks : kChunks) expect_equal(in, chunks, 1e-13);
  // None at all: the loss is NaN, the gradients are zero.
  in.targets.fill_(-100);
  for (const bool chunked : {true, false}) {
    const at::Tensor loss = chunked ? chunked_cross_entropy(in.rows, in.weight, in.targets, {4, 10})
                                    : linear_cross_entropy(in.rows, in.weight, in.targets);
    EXPECT_TRUE(std::isnan(loss.item<double>()));
    for (const auto& gradient : torch::autograd::grad({loss}, {in.rows, in.weight}))
      EXPECT_TRUE(at::equal(gradient, at::zeros_like(gradient))) << chunked;
  }
}

TEST(LinearCrossEntropy, FrozenInputsGetNoGradient) {
  for (const bool frozen_weight : {true, false}) {
    LossInputs in(9, 5);
    (frozen_weight ? in.weight : in.rows).requires_grad_(false);
    const at::Tensor input = frozen_weight ? in.rows : in.weight;
    expect_close(torch::autograd::grad(
                     {chunked_cross_entropy(in.rows, in.weight, in.targets, {4, 3})}, {input})[0],
                 torch::autograd::grad({in.plain()}, {input})[0], 1e-13);
  }
}

TEST(LinearCrossEntropy, ASecondBackwardComputesTheGradientsAgain) {
  LossInputs in(9, 5);
  const at::Tensor loss = chunked_cross_entropy(in.rows, in.weight, in.targets, {4, 3});
  (loss * 2).backward({}, true);
  loss.backward();
  const auto expected = torch::autograd::grad({in.plain()}, {in.rows, in.weight});
  expect_close(in.rows.grad(), expected[0] * 3, 1e-13);
  expect_close(in.weight.grad(), expected[1] * 3, 1e-13);
}

TEST(LinearCrossEntropy, AutocastComputesLogitsInItsDtype) {
  LossInputs in(20, 30, at::kFloat);
  const auto state = compat::AutocastState{{true, at::kBFloat16}, {false, at::kHalf}};
  const compat::AutocastState::Scope autocast(state);
  const at::Tensor loss = chunked_cross_entropy(in.rows, in.weight, in.targets, {8, 30});
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_TRUE(
      at::equal(loss, chunked_cross_entropy(in.rows.to(at::kBFloat16), in.weight.to(at::kBFloat16),
                                            in.targets, {8, 30})));
  expect_close(loss, in.plain(), 0.02);
  const auto ours = torch::autograd::grad({loss}, {in.rows, in.weight});
  EXPECT_EQ(ours[1].scalar_type(), at::kFloat);
  LossInputs exact(20, 30);
  expect_close(ours[1], torch::autograd::grad({exact.plain()}, {exact.weight})[0], 0.01);
}

TEST(LinearCrossEntropy, RefusesTargetsOutOfRange) {
  LossInputs in(9, 5);
  const auto run = [&] { linear_cross_entropy(in.rows, in.weight, in.targets); };
  for (const int64_t target : {5, -1, -101}) {
    in.targets[4] = target;
    EXPECT_THAT(thrown_by(run), HasSubstr("cross entropy: a target is " + std::to_string(target) +
                                          "; expected 0 to 4, or -100"));
  }
}

TEST(LinearCrossEntropy, RefusesASecondDerivative) {
  LossInputs in(9, 5);
  EXPECT_THAT(thrown_by([&] {
                torch::autograd::grad(
                    {chunked_cross_entropy(in.rows, in.weight, in.targets, {4, 3})}, {in.rows}, {},
                    true, true);
              }),
              HasSubstr("cross entropy: this backward has create_graph"));
}

TEST(LinearCrossEntropy, AChunkHasAtMost8MiLogits) {
  const auto expect = [](int64_t classes, int64_t tokens, int64_t of_classes) {
    const auto chunks = CrossEntropyChunks::of(classes);
    EXPECT_EQ(chunks.tokens, tokens) << classes;
    EXPECT_EQ(chunks.classes, of_classes) << classes;
  };
  expect(1, 1 << 23, 1);
  expect(256, 32768, 256);
  expect(50257, 166, 50257);
  expect(65536, 128, 65536);
  expect(128256, 128, 65536);
}

// Whole logits have the bits of at::cross_entropy_loss. Where there are more than one chunk has,
// the result is that of the chunks.
TEST(LinearCrossEntropy, ChunksBeginWhereOneIsNotEnough) {
  const int64_t classes = 1 << 16, most = CrossEntropyChunks::of(classes).tokens;
  for (const int64_t tokens : {most, most + 1}) {
    const LossInputs in(tokens, classes, at::kFloat);
    const at::Tensor loss = linear_cross_entropy(in.rows, in.weight, in.targets);
    const bool chunked = loss.grad_fn()->name().find("ChunkedCrossEntropy") != std::string::npos;
    EXPECT_EQ(chunked, tokens > most) << tokens << loss.grad_fn()->name();
    if (!chunked) EXPECT_TRUE(at::equal(loss, in.plain()));
    expect_close(loss, in.plain(), 1e-5);
  }
}

}  // namespace
}  // namespace tessera::testing
