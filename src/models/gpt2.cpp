#include "tessera/models/gpt2.h"

#include <cmath>

#include <torch/nn/modules/container/modulelist.h>

#include "models/linear_cross_entropy.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/error.h"

namespace tessera {

// The submodule `transformer` and its list `h` exist only for the parameters' names. The members
// refer to the modules inside directly.
GPT2Impl::GPT2Impl(const GPT2Options& options) : options_(options) {
  options_.validate();
  recomputed_ = options_.recomputed_blocks();
  const auto transformer =
      register_module("transformer", std::make_shared<torch::nn::Module>("GPT2Model"));
  const auto embedding = [&](const char* name, int64_t rows) {
    // Given a weight, Embedding does not draw from the global generator. initialize() fills it.
    return transformer->register_module(
        name, torch::nn::Embedding(torch::nn::EmbeddingOptions(rows, options_.n_embd)
                                       ._weight(at::empty({rows, options_.n_embd}))));
  };
  wte_ = embedding("wte", options_.vocab_size);
  wpe_ = embedding("wpe", options_.n_positions);
  const auto list = transformer->register_module("h", torch::nn::ModuleList());
  for (int64_t i = 0; i < options_.n_layer; ++i) {
    blocks_.emplace_back(options_);
    list->push_back(blocks_.back());
  }
  ln_f_ = transformer->register_module(
      "ln_f", torch::nn::LayerNorm(
                  torch::nn::LayerNormOptions({options_.n_embd}).eps(options_.layer_norm_epsilon)));
  if (!options_.tie_word_embeddings) {
    const auto head = register_module("lm_head", std::make_shared<torch::nn::Module>("LMHead"));
    lm_head_ =
        head->register_parameter("weight", at::empty({options_.vocab_size, options_.n_embd}));
  }
  initialize();
}

void GPT2Impl::initialize() {
  const torch::NoGradGuard no_grad;
  // One generator and a fixed order of the parameters give the same numbers on every rank.
  at::Generator generator = at::detail::createCPUGenerator(options_.seed);
  const double residual =
      options_.initializer_range / std::sqrt(2.0 * static_cast<double>(options_.n_layer));
  for (auto& item : named_parameters()) {
    const std::string& name = item.key();
    at::Tensor& parameter = item.value();
    const auto ends_with = [&](const char* suffix) { return name.ends_with(suffix); };
    if (ends_with(".bias")) {
      parameter.zero_();
    } else if (parameter.dim() == 1) {
      parameter.fill_(1.0);
    } else {
      parameter.normal_(0.0, ends_with("c_proj.weight") ? residual : options_.initializer_range,
                        generator);
    }
  }
}

/// [Note: gradient of a tied embedding] Of a tied embedding, the head's gradient arrives first; it
/// is dense. If the embedding's own gradient is sparse, autograd adds it to the head's in place. If
/// it is dense, autograd makes two more tensors of this size: the gradient and the sum. The last
/// bits of the sum differ, so small embeddings keep the dense gradient.
at::Tensor GPT2Impl::embed(const at::Tensor& tokens) {
  constexpr size_t kLarge = 64 << 20;  // bytes
  const at::Tensor& weight = wte_->weight;
  const bool sparse = !lm_head_.defined() && weight.nbytes() >= kLarge &&
                      weight.device().is_cpu() && weight.scalar_type() == at::kFloat;
  return at::embedding(weight, tokens, -1, false, sparse);
}

at::Tensor GPT2Impl::hidden(const at::Tensor& tokens) {
  if (tokens.dim() != 2 || tokens.scalar_type() != at::kLong) {
    throw UsageError("GPT2: tokens must be int64 [batch, length], given " +
                     std::string(c10::toString(tokens.scalar_type())) + " with " +
                     std::to_string(tokens.dim()) + " dimensions");
  }
  const int64_t length = tokens.size(1);
  if (length > options_.n_positions) {
    throw UsageError("GPT2: " + std::to_string(length) + " tokens in a sequence, n_positions is " +
                     std::to_string(options_.n_positions));
  }
  at::Tensor x = embed(tokens) + wpe_->weight.slice(0, 0, length);
  if (options_.embd_pdrop > 0 && is_training()) x = at::dropout(x, options_.embd_pdrop, true);
  const bool may_recompute = is_training() && at::GradMode::is_enabled();
  for (size_t i = 0; i < blocks_.size(); ++i) {
    GPT2Block& block = blocks_[i];
    x = may_recompute && recomputed_[i]
            ? checkpoint([&block](const at::Tensor& h) { return block(h); }, x)
            : block(x);
  }
  return ln_f_(x);
}

const at::Tensor& GPT2Impl::head() const { return lm_head_.defined() ? lm_head_ : wte_->weight; }

at::Tensor GPT2Impl::project(const at::Tensor& x) { return at::linear(x, head()); }

at::Tensor GPT2Impl::forward(const at::Tensor& tokens) { return project(hidden(tokens)); }

at::Tensor GPT2Impl::loss(const at::Tensor& tokens, const at::Tensor& targets) {
  if (targets.sizes() != tokens.sizes() || targets.scalar_type() != at::kLong)
    throw UsageError("GPT2: targets must be int64 of the tokens' shape");
  const at::Tensor x = hidden(tokens);
  return linear_cross_entropy(x.view({-1, options_.n_embd}), head(), targets.reshape({-1}));
}

}  // namespace tessera
