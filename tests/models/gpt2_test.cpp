// Compares the model with a second implementation in plain matrix products, and its gradients with
// finite differences.

#include "tessera/models/gpt2.h"

#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/error.h"

namespace tessera {
namespace {

GPT2Options small() {
  GPT2Options options;
  options.vocab_size = 61;
  options.n_positions = 16;
  options.n_embd = 24;
  options.n_layer = 2;
  options.n_head = 3;
  return options;
}

// The initial weights would hide errors, because biases are 0 and layer norms are 1.
void roughen(GPT2& model) {
  const torch::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(11);
  for (auto& parameter : model->parameters())
    parameter.add_(at::empty_like(parameter).normal_(0, 0.2, generator));
}

at::Tensor some_tokens(int64_t batch, int64_t length, int64_t vocab = 61) {
  return at::randint(vocab, {batch, length}, at::detail::createCPUGenerator(3),
                     at::TensorOptions(at::kLong));
}

/// GPT-2 in plain matrix products, with the parameters of `model`.
class PlainGpt2 {
 public:
  explicit PlainGpt2(GPT2& model, int64_t heads, std::string activation)
      : parameters_(model->named_parameters()), heads_(heads), activation_(std::move(activation)) {}

  at::Tensor forward(const at::Tensor& tokens, int64_t layers) {
    at::Tensor x = p("transformer.wte.weight").index({tokens}) +
                   p("transformer.wpe.weight").slice(0, 0, tokens.size(1));
    for (int64_t i = 0; i < layers; ++i) {
      const std::string h = "transformer.h." + std::to_string(i) + ".";
      x = x + attention(norm(x, h + "ln_1."), h + "attn.");
      x = x + affine(act(affine(norm(x, h + "ln_2."), h + "mlp.c_fc.")), h + "mlp.c_proj.");
    }
    x = norm(x, "transformer.ln_f.");
    const std::string head =
        parameters_.contains("lm_head.weight") ? "lm_head.weight" : "transformer.wte.weight";
    return x.matmul(p(head).t());
  }

 private:
  const at::Tensor& p(const std::string& name) { return parameters_[name]; }

  at::Tensor affine(const at::Tensor& x, const std::string& name) {
    return x.matmul(p(name + "weight")) + p(name + "bias");
  }

  at::Tensor norm(const at::Tensor& x, const std::string& name) {
    const at::Tensor centred = x - x.mean(-1, true);
    return centred / (centred.pow(2).mean(-1, true) + 1e-5).sqrt() * p(name + "weight") +
           p(name + "bias");
  }

  at::Tensor act(const at::Tensor& x) {
    if (activation_ == "relu") return x.clamp_min(0);
    if (activation_ == "gelu") return 0.5 * x * (1 + at::erf(x / std::sqrt(2.0)));
    return 0.5 * x * (1 + at::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x.pow(3))));
  }

  // Each row attends only to the rows up to itself, without a mask.
  at::Tensor attention(const at::Tensor& x, const std::string& name) {
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2), each = width / heads_;
    const at::Tensor qkv = affine(x, name + "c_attn.");
    const at::Tensor out = at::zeros({batch, length, width}, x.options());
    for (int64_t head = 0; head < heads_; ++head) {
      const auto part = [&](int64_t which) {
        return qkv.narrow(2, which * width + head * each, each);
      };
      for (int64_t t = 0; t < length; ++t) {
        const at::Tensor k = part(1).narrow(1, 0, t + 1), v = part(2).narrow(1, 0, t + 1);
        const at::Tensor scores =
            (part(0).narrow(1, t, 1) * k).sum(-1) / std::sqrt(static_cast<double>(each));
        out.narrow(2, head * each, each)
            .select(1, t)
            .copy_((at::softmax(scores, -1).unsqueeze(-1) * v).sum(1));
      }
    }
    return affine(out, name + "c_proj.");
  }

  torch::OrderedDict<std::string, at::Tensor> parameters_;
  int64_t heads_;
  std::string activation_;
};

TEST(GPT2, EqualsASecondImplementation) {
  const torch::NoGradGuard no_grad;
  for (const char* activation : {"gelu_new", "gelu", "relu"}) {
    for (const bool tied : {true, false}) {
      GPT2Options options = small();
      options.activation = activation;
      options.tie_word_embeddings = tied;
      GPT2 model(options);
      roughen(model);
      model->to(at::kDouble);
      for (const int64_t length : {16, 1, 7}) {
        const at::Tensor tokens = some_tokens(3, length);
        const at::Tensor expected = PlainGpt2(model, 3, activation).forward(tokens, 2);
        const at::Tensor logits = model->forward(tokens);
        ASSERT_EQ(logits.sizes(), at::IntArrayRef({3, length, 61}));
        EXPECT_LT((logits - expected).abs().max().item<double>(), 1e-10)
            << activation << tied << length;
      }
    }
  }
}

/// Sequences of this length have attention in blocks.
GPT2Options small_with_long_sequences() {
  GPT2Options options = small();
  options.n_positions = 300;
  return options;
}

TEST(GPT2, LongSequencesEqualASecondImplementation) {
  const torch::NoGradGuard no_grad;
  GPT2 model(small_with_long_sequences());
  roughen(model);
  model->to(at::kDouble);
  const at::Tensor tokens = some_tokens(2, 300);
  const at::Tensor expected = PlainGpt2(model, 3, "gelu_new").forward(tokens, 2);
  EXPECT_LT((model->forward(tokens) - expected).abs().max().item<double>(), 1e-10);
}

TEST(GPT2, Float32StaysWithin1e5OfFloat64) {
  const torch::NoGradGuard no_grad;
  GPT2 model(small());
  roughen(model);
  const at::Tensor tokens = some_tokens(4, 17);
  const auto loss = [&] {
    return model->loss(tokens.slice(1, 0, 16), tokens.slice(1, 1, 17)).item<double>();
  };
  const double single = loss();
  model->to(at::kDouble);
  EXPECT_NEAR(single, loss(), 1e-5 * loss());
}

TEST(GPT2, LossIsTheMeanCrossEntropy) {
  const torch::NoGradGuard no_grad;
  GPT2 model(small());
  const at::Tensor tokens = some_tokens(2, 9);
  const at::Tensor inputs = tokens.slice(1, 0, 8), targets = tokens.slice(1, 1, 9);
  const at::Tensor chosen =
      at::log_softmax(model->forward(inputs), -1).gather(-1, targets.unsqueeze(-1));
  EXPECT_NEAR(model->loss(inputs, targets).item<double>(), -chosen.mean().item<double>(), 1e-6);
  EXPECT_NEAR(model->loss(inputs, targets).item<double>(), std::log(61.0), 0.3)
      << "an untrained model knows nothing";
}

void expect_gradients_of_central_differences(GPT2 model, int64_t length) {
  roughen(model);
  model->to(at::kDouble);
  const at::Tensor tokens = some_tokens(2, length + 1);
  const auto loss = [&] {
    return model->loss(tokens.slice(1, 0, length), tokens.slice(1, 1, length + 1));
  };
  loss().backward();
  const torch::NoGradGuard no_grad;
  for (auto& item : model->named_parameters()) {
    // In the direction of the gradient's sign, every entry contributes with the same sign.
    at::Tensor& parameter = item.value();
    ASSERT_TRUE(parameter.grad().defined()) << item.key();
    const at::Tensor direction = parameter.grad().sign();
    const double step = 1e-6;
    parameter.add_(direction, step);
    const double above = loss().item<double>();
    parameter.sub_(direction, 2 * step);
    const double below = loss().item<double>();
    parameter.add_(direction, step);
    const double expected = parameter.grad().abs().sum().item<double>();
    EXPECT_NEAR((above - below) / (2 * step), expected, 1e-5 * expected + 1e-9) << item.key();
  }
}

TEST(GPT2, GradientsEqualCentralDifferences) {
  expect_gradients_of_central_differences(GPT2(small()), 12);
}

TEST(GPT2, GradientsOfLongSequencesEqualCentralDifferences) {
  expect_gradients_of_central_differences(GPT2(small_with_long_sequences()), 300);
}

TEST(GPT2, AnOutputDoesNotDependOnLaterTokens) {
  const torch::NoGradGuard no_grad;
  GPT2 model(small());
  roughen(model);
  at::Tensor tokens = some_tokens(1, 12);
  const at::Tensor before = model->forward(tokens);
  tokens[0][7] = (tokens[0][7].item<int64_t>() + 1) % 61;
  const at::Tensor after = model->forward(tokens);
  EXPECT_TRUE(at::equal(before.slice(1, 0, 7), after.slice(1, 0, 7)));
  EXPECT_FALSE(at::allclose(before.select(1, 7), after.select(1, 7)));
}

TEST(GPT2, InitialWeightsDependOnTheSeedOnly) {
  torch::manual_seed(1);
  const at::Tensor untouched = at::rand({4});
  torch::manual_seed(1);
  GPT2Options options = small();
  options.n_embd = 96;
  GPT2 first(options);
  EXPECT_TRUE(at::equal(at::rand({4}), untouched)) << "the global generator was used";
  torch::manual_seed(2);
  GPT2 second(options);
  options.seed = 1;
  GPT2 other(options);
  for (auto& item : first->named_parameters()) {
    const at::Tensor& value = item.value();
    EXPECT_TRUE(at::equal(value, second->named_parameters()[item.key()])) << item.key();
    if (value.dim() == 1) {
      EXPECT_TRUE((value == (item.key().ends_with("bias") ? 0 : 1)).all().item<bool>())
          << item.key();
      continue;
    }
    EXPECT_FALSE(at::equal(value, other->named_parameters()[item.key()])) << item.key();
    const double sigma = item.key().ends_with("c_proj.weight") ? 0.02 / std::sqrt(4.0) : 0.02;
    EXPECT_NEAR(value.std().item<double>(), sigma, 0.06 * sigma) << item.key();
    EXPECT_NEAR(value.mean().item<double>(), 0, 0.1 * sigma) << item.key();
  }
}

TEST(GPT2, DropoutActsInTrainingOnly) {
  const torch::NoGradGuard no_grad;
  GPT2Options options = small();
  options.embd_pdrop = options.attn_pdrop = options.resid_pdrop = 0.3;
  GPT2 model(options), plain(small());
  const at::Tensor tokens = some_tokens(2, 8);
  EXPECT_FALSE(at::equal(model->forward(tokens), model->forward(tokens)));
  model->eval();
  EXPECT_TRUE(at::equal(model->forward(tokens), plain->forward(tokens)));
}

TEST(GPT2, GeneratesWithTheGivenGenerator) {
  GPT2 model(small());
  roughen(model);
  const at::Tensor prompt = some_tokens(1, 5)[0];
  const auto draw = [&](uint64_t seed, GPT2SampleOptions sample) {
    return model->generate(prompt, 30, sample, at::detail::createCPUGenerator(seed));
  };
  const at::Tensor text = draw(1, {});
  ASSERT_EQ(text.size(0), 35);
  EXPECT_TRUE(at::equal(text.slice(0, 0, 5), prompt));
  EXPECT_TRUE(at::equal(text, draw(1, {})));
  EXPECT_FALSE(at::equal(text, draw(2, {})));
  const at::Tensor greedy = draw(1, {0.0, 0});
  EXPECT_TRUE(at::equal(greedy, draw(2, {1.0, 1})))
      << "the likeliest one is the only one of the top 1";
  const torch::NoGradGuard no_grad;
  EXPECT_EQ(greedy[34].item<int64_t>(),
            model->forward(greedy.slice(0, 18, 34).unsqueeze(0))[0][15].argmax().item<int64_t>());
  EXPECT_TRUE(model->is_training());
  EXPECT_THROW(model->generate(at::empty({0}, at::kLong), 1), UsageError);
  EXPECT_THROW(model->generate(prompt, 1, {-1.0, 0}), UsageError);
}

TEST(GPT2, RefusesWrongInputs) {
  GPT2 model(small());
  EXPECT_THROW(model->forward(at::zeros({1, 17}, at::kLong)), UsageError);
  EXPECT_THROW(model->forward(at::zeros({4}, at::kLong)), UsageError);
  EXPECT_THROW(model->forward(at::zeros({1, 4})), UsageError);
  EXPECT_THROW(model->loss(some_tokens(1, 4), some_tokens(1, 5)), UsageError);
}

}  // namespace
}  // namespace tessera
