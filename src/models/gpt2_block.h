#pragma once

#include <torch/nn/pimpl.h>

#include "tessera/models/gpt2.h"

// The parts of a transformer block. Parameters have the names of Hugging Face's GPT-2.

namespace tessera {

/// An affine map y = x·W + b whose weight is stored as [in, out], as in OpenAI's release.
class Conv1DImpl : public torch::nn::Module {
 public:
  Conv1DImpl(int64_t in, int64_t out);
  /// [N, in] to [N, out].
  at::Tensor forward(const at::Tensor& x) { return at::addmm(bias_, x, weight_); }

 private:
  at::Tensor weight_, bias_;
};
TORCH_MODULE(Conv1D);

/// Causal self-attention over [B·T, n_embd] rows.
class GPT2AttentionImpl : public torch::nn::Module {
 public:
  explicit GPT2AttentionImpl(const GPT2Options& options);
  at::Tensor forward(const at::Tensor& rows, int64_t batch, int64_t length);

 private:
  int64_t heads_;
  double attn_pdrop_, resid_pdrop_;
  Conv1D c_attn_{nullptr}, c_proj_{nullptr};
};

/// c_proj(activation(c_fc(x))) over [N, n_embd] rows.
class GPT2MLPImpl : public torch::nn::Module {
 public:
  explicit GPT2MLPImpl(const GPT2Options& options);
  at::Tensor forward(const at::Tensor& rows);

 private:
  std::string activation_;
  double resid_pdrop_;
  Conv1D c_fc_{nullptr}, c_proj_{nullptr};
};

}  // namespace tessera
