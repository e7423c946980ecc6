#include "models/causal_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/CPUGeneratorImpl.h>

#include "models/refuse_create_graph.h"
#include "tessera/detail/torch_compat.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

double scale_of(const at::Tensor& q) { return 1.0 / std::sqrt(static_cast<double>(q.size(2))); }

/// The mask to add to the scores of queries from `query` on and keys from `key` on: -inf if a key
/// is later than its query.
at::Tensor later_keys(int64_t query, int64_t queries, int64_t key, int64_t keys,
                      const at::TensorOptions& options) {
  return at::full({queries, keys}, -std::numeric_limits<double>::infinity(), options)
      .triu(query - key + 1);
}

/// With baddbmm this is as fast on CPUs as libtorch's fused attention, for short sequences.
at::Tensor plain_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           double dropout) {
  const at::Tensor mask = later_keys(0, q.size(1), 0, q.size(1), q.options());
  const at::Tensor weights =
      at::softmax(at::baddbmm(mask, q, k.transpose(1, 2), 1, scale_of(q)), -1);
  return at::bmm(dropout > 0 ? at::dropout(weights, dropout, true) : weights, v);
}

/// The blocks of one call, which forward and backward compute in the same way.
class Blocks {
 public:
  Blocks(const at::Tensor& q, at::Tensor k, at::Tensor v, double dropout, int64_t seed,
         const AttentionBlocks& sizes)
      : scale_(scale_of(q)),
        q_(q * scale_),
        k_(std::move(k)),
        v_(std::move(v)),
        sum_type_(at::promote_types(q_.scalar_type(), at::kFloat)),
        dropout_(dropout),
        seed_(seed),
        sizes_(sizes) {}

  /// The result, and the logarithm of each row's sum of exponentials: [N, T, 1].
  std::pair<at::Tensor, at::Tensor> forward() const {
    at::Tensor out = at::empty_like(v_);
    at::Tensor log_sums = at::empty({v_.size(0), length(), 1}, v_.options().dtype(sum_type_));
    for (int64_t first = 0; first < length(); first += sizes_.queries) {
      const int64_t end = std::min(length(), first + sizes_.queries);
      rows(first, end, out.slice(1, first, end), log_sums.slice(1, first, end));
    }
    return {out, log_sums};
  }

  /// The gradients of q, k and v.
  variable_list backward(const at::Tensor& out, const at::Tensor& log_sums,
                         const at::Tensor& grad_out) const {
    const auto zeros = [&] { return at::zeros(v_.sizes(), v_.options().dtype(sum_type_)); };
    const at::Tensor delta = (grad_out.to(sum_type_) * out).sum(-1, true, sum_type_);
    const at::Tensor grad_q = zeros(), grad_k = zeros(), grad_v = zeros();
    for (int64_t first = 0; first < length(); first += sizes_.queries) {
      const int64_t end = std::min(length(), first + sizes_.queries);
      const at::Tensor q = q_.slice(1, first, end), grad = grad_out.slice(1, first, end);
      for (int64_t key = 0; key < end; key += sizes_.keys) {
        const int64_t last = std::min(end, key + sizes_.keys);
        const at::Tensor k = k_.slice(1, key, last), v = v_.slice(1, key, last);
        const at::Tensor weights =
            scores(first, end, key, last).sub_(log_sums.slice(1, first, end)).exp_();
        at::Tensor grad_scores = at::bmm(grad, v.transpose(1, 2)).to(sum_type_);
        at::Tensor used = weights;
        if (dropout_ > 0) {
          const at::Tensor kept = mask(first, end, key, last);
          used = weights * kept;
          grad_scores.mul_(kept);
        }
        grad_v.slice(1, key, last).add_(at::bmm(as_input(used).transpose(1, 2), grad));
        grad_scores.sub_(delta.slice(1, first, end)).mul_(weights);
        grad_scores = as_input(grad_scores);
        grad_q.slice(1, first, end).add_(at::bmm(grad_scores, k));
        grad_k.slice(1, key, last).add_(at::bmm(grad_scores.transpose(1, 2), q));
      }
    }
    grad_q.mul_(scale_);
    return {as_input(grad_q), as_input(grad_k), as_input(grad_v)};
  }

 private:
  int64_t length() const { return q_.size(1); }
  at::Tensor as_input(const at::Tensor& x) const { return x.to(q_.scalar_type()); }

  /// Scores of queries [first, end) with keys [key, last); -inf where a key is later than the
  /// query.
  at::Tensor scores(int64_t first, int64_t end, int64_t key, int64_t last) const {
    at::Tensor result =
        at::bmm(q_.slice(1, first, end), k_.slice(1, key, last).transpose(1, 2)).to(sum_type_);
    if (last - 1 > first)
      result.add_(later_keys(first, end - first, key, last - key, result.options()));
    return result;
  }

  /// The dropout mask of this block, scaled by 1 / (1 - p). Forward and backward get the same one.
  at::Tensor mask(int64_t first, int64_t end, int64_t key, int64_t last) const {
    at::Generator generator =
        at::detail::createCPUGenerator(static_cast<uint64_t>(seed_ + first * length() + key));
    return at::empty({q_.size(0), end - first, last - key}, at::TensorOptions(sum_type_))
        .bernoulli_(1 - dropout_, generator)
        .div_(1 - dropout_)
        .to(q_.device());
  }

  /// One block of queries over all its keys. After each block of keys `sum` and `mixed` hold the
  /// sums so far, relative to the largest score so far.
  void rows(int64_t first, int64_t end, at::Tensor out, at::Tensor log_sums) const {
    at::Tensor largest, sum, mixed;
    for (int64_t key = 0; key < end; key += sizes_.keys) {
      const int64_t last = std::min(end, key + sizes_.keys);
      at::Tensor weights = scores(first, end, key, last);
      const at::Tensor now =
          key == 0 ? weights.amax(-1, true) : at::maximum(largest, weights.amax(-1, true));
      weights.sub_(now).exp_();
      const at::Tensor part = weights.sum(-1, true);
      if (dropout_ > 0) weights.mul_(mask(first, end, key, last));
      const at::Tensor values = at::bmm(as_input(weights), v_.slice(1, key, last)).to(sum_type_);
      if (key == 0) {
        sum = part;
        mixed = values;
      } else {
        const at::Tensor shrink = (largest - now).exp_();
        sum.mul_(shrink).add_(part);
        mixed.mul_(shrink).add_(values);
      }
      largest = now;
    }
    out.copy_(mixed.div_(sum));
    log_sums.copy_(sum.log_().add_(largest));
  }

  double scale_;
  at::Tensor q_, k_, v_;  // q is scaled
  at::ScalarType sum_type_;
  double dropout_;
  int64_t seed_;
  AttentionBlocks sizes_;
};

struct BlockwiseAttention : torch::autograd::Function<BlockwiseAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, double dropout, int64_t queries, int64_t keys) {
    // The blocks choose their dtypes themselves.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const int64_t seed = dropout > 0 ? at::empty({}, at::kLong).random_().item<int64_t>() >> 1 : 0;
    auto [out, log_sums] = Blocks(q, k, v, dropout, seed, {queries, keys}).forward();
    context->save_for_backward({q, k, v, out, log_sums});
    context->saved_data["dropout"] = dropout;
    context->saved_data["seed"] = seed;
    context->saved_data["queries"] = queries;
    context->saved_data["keys"] = keys;
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list grad_out) {
    refuse_create_graph("attention", "attention in blocks");
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const Blocks blocks(saved[0], saved[1], saved[2], data["dropout"].toDouble(),
                        data["seed"].toInt(), {data["queries"].toInt(), data["keys"].toInt()});
    variable_list result = blocks.backward(saved[3], saved[4], grad_out[0]);
    result.resize(6);
    return result;
  }
};

}  // namespace

at::Tensor blockwise_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               double dropout, const AttentionBlocks& blocks) {
  return BlockwiseAttention::apply(q, k, v, dropout, blocks.queries, blocks.keys);
}

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double dropout) {
  if (q.size(1) <= kWholeScoresLength) return plain_attention(q, k, v, dropout);
  if (compat::has_fused_attention(q, dropout))
    return compat::fused_causal_attention(q, k, v, dropout);
  return blockwise_attention(q, k, v, dropout);
}

}  // namespace tessera
