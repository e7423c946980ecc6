#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include "tessera/weights/weights.h"

// GPT-2 (Radford et al., 2019) as a plain module, without any code for sharding. Parameter names
// and shapes are those of Hugging Face's GPT2LMHeadModel: `transformer.h.0.attn.c_attn.weight` is
// [n_embd, 3·n_embd] (Conv1D, transposed), and a tied head is `transformer.wte.weight`.

#pragma GCC visibility push(default)
namespace tessera {

class OptionReader;

struct GPT2Options {
  int64_t vocab_size = 50257;
  int64_t n_positions = 1024;
  int64_t n_embd = 768;
  int64_t n_layer = 12;
  int64_t n_head = 12;  ///< Must divide n_embd.
  int64_t n_inner = 0;  ///< Width of the MLP. 0: 4·n_embd.
  double layer_norm_epsilon = 1e-5;
  double initializer_range = 0.02;
  double embd_pdrop = 0.0;  ///< Dropout probabilities in [0, 1), used in training mode only.
  double attn_pdrop = 0.0;
  double resid_pdrop = 0.0;
  /// On: the head uses the token embedding. Off: the head has a parameter of its own.
  bool tie_word_embeddings = true;
  std::string activation =
      "gelu_new";     ///< "gelu_new" (tanh approximation), "gelu" (erf) or "relu".
  uint64_t seed = 0;  ///< Seed of the initial weights only; not part of config.json.
  /// On: each block is run under tessera::checkpoint in training. Less memory, about a third more
  /// time, the same values. Not part of config.json.
  bool activation_checkpointing = false;
  /// The blocks that this concerns: their names ("transformer.h.0" and so on) match one of these
  /// patterns, in which `*` matches any characters but dots. Empty: all of them. validate() refuses
  /// a pattern that matches no block. Not part of config.json.
  std::vector<std::string> activation_checkpointing_blocks = {};
  /// Only every n-th of these blocks, from the first on. At least 1: all of them. Not part of
  /// config.json.
  int64_t activation_checkpointing_every = 1;

  /// [n_layer]: true for each block that runs under tessera::checkpoint in training.
  std::vector<bool> recomputed_blocks() const;

  /// Reads the options of the arithmetic, without dropouts, from a config. See option_reader.h.
  void read(OptionReader& options);
  /// Throws UsageError naming the option, its value and the expected values. The module's
  /// constructor calls it.
  void validate() const;

  /// Reads Hugging Face's config.json. Keys that do not concern the model's arithmetic are ignored;
  /// missing keys keep the defaults above. Throws UsageError naming the file and the key.
  static GPT2Options from_config_json(const std::string& path);
  /// The text of a config.json from which Hugging Face constructs this model.
  std::string to_config_json() const;
};

class [[gnu::visibility("hidden")]] GPT2AttentionImpl;
class [[gnu::visibility("hidden")]] GPT2MLPImpl;

/// One transformer block, pre-norm: x + attn(ln_1(x)), then x + mlp(ln_2(x)). Input and output are
/// [B, T, n_embd].
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
  double temperature = 1.0;  ///< 0: always the most likely token.
  int64_t top_k = 0;         ///< Draws among the k most likely tokens. 0: among all.
};

class GPT2Impl : public torch::nn::Module {
 public:
  /// Initialises the weights as Hugging Face does: normally distributed with mean 0 and standard
  /// deviation initializer_range, divided by sqrt(2·n_layer) for the residual projections; biases
  /// are 0 and layer-norm weights 1. The weights depend on `options.seed` only, so they are equal
  /// on every rank and for every world size. The global random state is neither read nor changed.
  /// float32, on the CPU.
  explicit GPT2Impl(const GPT2Options& options = {});

  /// `tokens` is int64 [B, T] with T ≤ n_positions. Returns logits [B, T, vocab_size].
  at::Tensor forward(const at::Tensor& tokens);

  /// Mean cross entropy in nats over the positions whose target is not -100, as a scalar; float32,
  /// or float64 for such weights. `tokens` and `targets` are int64 [B, T]. UsageError for a target
  /// that is neither a token nor -100; on an accelerator the loss is NaN instead. At most 2^23
  /// logits exist at a time. The loss of more logits, or of sequences of more than 256 tokens, can
  /// be differentiated only once: UsageError, or libtorch's error, in a backward with create_graph.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);

  /// Returns `prompt` (int64 [T], T ≥ 1) followed by `count` sampled tokens. Each token depends on
  /// the last n_positions tokens only. Runs without gradients and in evaluation mode; the previous
  /// mode is restored afterwards. Without `generator` the global one is used.
  at::Tensor generate(const at::Tensor& prompt, int64_t count, const GPT2SampleOptions& sample = {},
                      std::optional<at::Generator> generator = std::nullopt);

  /// Copies weights (see Weights) into the parameters, converting dtype and device. Names may have
  /// the prefix `transformer.` or not. Mask buffers (`attn.bias`, `attn.masked_bias`) are ignored.
  /// `lm_head.weight` of a tied model is accepted if it equals the embedding. Throws UsageError
  /// listing missing and unexpected names and wrong shapes; no parameter has changed then. Local.
  void load_weights(const std::string& path);
  /// The same from opened weights of any kind. Without `strict`, names that are missing or
  /// unexpected are no error; they are returned.
  UnmatchedNames load_weights(const Weights& weights, bool strict = true);
  /// The entries that load_weights() reads, by name. Throws the same errors, except for a different
  /// head; reads no tensor and changes nothing. Local.
  WeightsMatch match_weights(const TensorSource& weights, bool strict = true) const;

  /// Writes every parameter under its name, with metadata {"format": "pt"}. Hugging Face can load
  /// the file. The file appears atomically, as with SafetensorsWriter. Local.
  void save_weights(const std::string& path) const;

  const GPT2Options& options() const { return options_; }

 private:
  at::Tensor embed(const at::Tensor& tokens);
  at::Tensor hidden(const at::Tensor& tokens);
  at::Tensor project(const at::Tensor& hidden);
  const at::Tensor& head() const;  // [vocab_size, n_embd]
  void initialize();

  GPT2Options options_;
  torch::nn::Embedding wte_{nullptr}, wpe_{nullptr};
  std::vector<GPT2Block> blocks_;
  std::vector<bool> recomputed_;  // of each block
  torch::nn::LayerNorm ln_f_{nullptr};
  at::Tensor lm_head_;  // undefined when tied
};
TORCH_MODULE(GPT2);

}  // namespace tessera
#pragma GCC visibility pop
