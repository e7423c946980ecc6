#include "models/gpt2_block.h"

#include <torch/nn/modules/normalization.h>

#include "models/causal_attention.h"

namespace tessera {
namespace {

at::Tensor activate(const at::Tensor& x, const std::string& activation) {
  if (activation == "relu") return at::relu(x);
  return at::gelu(x, activation == "gelu_new" ? "tanh" : "none");
}

/// Dropout; without the operator if it has no effect.
at::Tensor dropped(const at::Tensor& x, double probability, bool training) {
  return training && probability > 0 ? at::dropout(x, probability, true) : x;
}

}  // namespace

Conv1DImpl::Conv1DImpl(int64_t in, int64_t out)
    : weight_(register_parameter("weight", at::empty({in, out}))),
      bias_(register_parameter("bias", at::zeros({out}))) {}

GPT2AttentionImpl::GPT2AttentionImpl(const GPT2Options& options)
    : heads_(options.n_head),
      attn_pdrop_(options.attn_pdrop),
      resid_pdrop_(options.resid_pdrop),
      c_attn_(register_module("c_attn", Conv1D(options.n_embd, 3 * options.n_embd))),
      c_proj_(register_module("c_proj", Conv1D(options.n_embd, options.n_embd))) {}

at::Tensor GPT2AttentionImpl::forward(const at::Tensor& rows, int64_t batch, int64_t length) {
  const int64_t width = rows.size(1);
  // One copy to [3, B·heads, T, width / heads] makes the products run on contiguous blocks, and
  // backward fills one gradient instead of concatenating three.
  const std::vector<at::Tensor> parts = c_attn_(rows)
                                            .view({batch, length, 3, heads_, width / heads_})
                                            .permute({2, 0, 3, 1, 4})
                                            .reshape({3, batch * heads_, length, width / heads_})
                                            .unbind(0);
  const at::Tensor mixed =
      causal_attention(parts[0], parts[1], parts[2], is_training() ? attn_pdrop_ : 0)
          .view({batch, heads_, length, width / heads_})
          .transpose(1, 2)
          .reshape({batch * length, width});
  return dropped(c_proj_(mixed), resid_pdrop_, is_training());
}

GPT2MLPImpl::GPT2MLPImpl(const GPT2Options& options)
    : activation_(options.activation), resid_pdrop_(options.resid_pdrop) {
  const int64_t inner = options.n_inner == 0 ? 4 * options.n_embd : options.n_inner;
  c_fc_ = register_module("c_fc", Conv1D(options.n_embd, inner));
  c_proj_ = register_module("c_proj", Conv1D(inner, options.n_embd));
}

at::Tensor GPT2MLPImpl::forward(const at::Tensor& rows) {
  return dropped(c_proj_(activate(c_fc_(rows), activation_)), resid_pdrop_, is_training());
}

namespace {

torch::nn::LayerNorm layer_norm(const GPT2Options& options) {
  return torch::nn::LayerNorm(
      torch::nn::LayerNormOptions({options.n_embd}).eps(options.layer_norm_epsilon));
}

}  // namespace

GPT2BlockImpl::GPT2BlockImpl(const GPT2Options& options)
    : ln_1_(register_module("ln_1", layer_norm(options))),
      attn_(register_module("attn", std::make_shared<GPT2AttentionImpl>(options))),
      ln_2_(register_module("ln_2", layer_norm(options))),
      mlp_(register_module("mlp", std::make_shared<GPT2MLPImpl>(options))) {}

at::Tensor GPT2BlockImpl::forward(const at::Tensor& x) {
  const int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
  // With rows [B·T, n_embd] every product is a single addmm.
  const at::Tensor rows = x.reshape({batch * length, width});
  const at::Tensor middle = rows + attn_->forward(ln_1_(rows), batch, length);
  return (middle + mlp_->forward(ln_2_(middle))).view({batch, length, width});
}

}  // namespace tessera
