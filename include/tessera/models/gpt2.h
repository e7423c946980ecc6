#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

// GPT-2 (Radford et al., 2019) as a plain module that knows nothing of sharding. Parameter names
// and shapes are those of Hugging Face's GPT2LMHeadModel: `transformer.h.0.attn.c_attn.weight` is
// [n_embd, 3·n_embd] (Conv1D, transposed), the head is `transformer.wte.weight` when tied.

namespace tessera {

struct GPT2Options {
  int64_t vocab_size = 50257;
  int64_t n_positions = 1024;
  int64_t n_embd = 768;
  int64_t n_layer = 12;
  int64_t n_head = 12;  ///< divides n_embd
  int64_t n_inner = 0;  ///< width of the MLP; 0: 4·n_embd
  double layer_norm_epsilon = 1e-5;
  double initializer_range = 0.02;
  double embd_pdrop = 0.0;  ///< dropout probabilities in [0, 1), used in training mode only
  double attn_pdrop = 0.0;
  double resid_pdrop = 0.0;
  bool tie_word_embeddings =
      true;  ///< the head is the token embedding, and no parameter of its own
  std::string activation = "gelu_new";  ///< "gelu_new" (tanh approximation), "gelu" (erf) or "relu"
  uint64_t seed = 0;                    ///< of the initial weights alone; not part of config.json

  /// Throws UsageError naming the option, its value and what is expected. The module's constructor
  /// calls it.
  void validate() const;

  /// Hugging Face's config.json. Keys that do not concern the model's arithmetic are ignored,
  /// missing ones keep the defaults above. Throws UsageError naming file and key.
  static GPT2Options from_config_json(const std::string& path);
  /// The text of a config.json that Hugging Face reads as this model.
  std::string to_config_json() const;
};

class GPT2AttentionImpl;
class GPT2MLPImpl;

/// One transformer block, pre-norm: x + attn(ln_1(x)), then x + mlp(ln_2(x)). [B, T, n_embd] to the
/// same.
class GPT2BlockImpl : public torch::nn::Module {
 public:
  explicit GPT2BlockImpl(const GPT2Options& options);
  at::Tensor forward(const at::Tensor& x);

 private:
  torch::nn::LayerNorm ln_1_{nullptr};
  std::shared_ptr<GPT2AttentionImpl> attn_;
  torch::nn::LayerNorm ln_2_{nullptr};
  std::shared_ptr<GPT2MLPImpl> mlp_;
};
TORCH_MODULE(GPT2Block);

struct GPT2SampleOptions {
  double temperature = 1.0;  ///< 0: always the likeliest token
  int64_t top_k = 0;         ///< draw among the k likeliest; 0: among all
};

class GPT2Impl : public torch::nn::Module {
 public:
  /// Initial weights as Hugging Face draws them: N(0, initializer_range), the residual projections
  /// divided by sqrt(2·n_layer), biases 0, layer norms 1. They depend on `options.seed` alone:
  /// equal on every rank, whatever the world size, and neither read nor touch the global random
  /// state. float32, CPU.
  explicit GPT2Impl(const GPT2Options& options = {});

  /// Tokens int64 [B, T], T ≤ n_positions, to logits [B, T, vocab_size].
  at::Tensor forward(const at::Tensor& tokens);

  /// Mean cross entropy in nats over all B·T positions; tokens and targets int64 [B, T]. A scalar
  /// to call backward on.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);

  /// `prompt` (int64 [T], T ≥ 1) followed by `count` sampled tokens; only the last n_positions
  /// tokens are looked at. Without gradients and, for its duration, in evaluation mode. No
  /// generator: the global one.
  at::Tensor generate(const at::Tensor& prompt, int64_t count, const GPT2SampleOptions& sample = {},
                      std::optional<at::Generator> generator = std::nullopt);

  /// Copies a model.safetensors into the parameters (converting dtype and device). Names with or
  /// without `transformer.`; mask buffers (`attn.bias`, `attn.masked_bias`) are ignored;
  /// `lm_head.weight` of a tied model is accepted when equal to the embedding. Throws UsageError
  /// listing missing, unexpected and mis-shaped names, and then no parameter has changed.
  void load_weights(const std::string& path);

  /// Writes every parameter under its name, with metadata {"format": "pt"}: a file that Hugging
  /// Face loads. Local to the calling rank; atomic as SafetensorsWriter is.
  void save_weights(const std::string& path) const;

  const GPT2Options& options() const { return options_; }

 private:
  at::Tensor hidden(const at::Tensor& tokens);
  at::Tensor project(const at::Tensor& hidden);
  void initialize();

  GPT2Options options_;
  torch::nn::Embedding wte_{nullptr}, wpe_{nullptr};
  std::vector<GPT2Block> blocks_;
  torch::nn::LayerNorm ln_f_{nullptr};
  at::Tensor lm_head_;  // undefined when tied
};
TORCH_MODULE(GPT2);

}  // namespace tessera
