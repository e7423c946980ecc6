#pragma once

#include <torch/types.h>

namespace tessera {

/// Up to this length causal_attention() computes the matrix of all scores, which is faster there.
inline constexpr int64_t kWholeScoresLength = 256;

/// Causal attention. `q`, `k`, `v` and the result are [N, T, width]. The result is softmax(q·kᵀ /
/// sqrt(width))·v, where a position sees itself and earlier positions. N counts the heads of all
/// sequences. `dropout`: the probability in [0, 1) that a weight is dropped.
///
/// Sequences of more than kWholeScoresLength positions never have T × T scores in memory:
/// libtorch's fused attention computes them if it has such a kernel, else blockwise_attention().
/// Both equal the plain formula up to rounding, and can be differentiated once.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double dropout);

/// Queries and keys whose scores exist at the same time. At least 1.
struct AttentionBlocks {
  int64_t queries = 128, keys = 256;
};

/// The same in blocks of queries and keys with the running softmax of FlashAttention (Dao et al.,
/// 2022), for any T. Backward computes the scores again. Softmax and sums are float32, or float64
/// for such inputs. Dropout draws one seed from the CPU's default generator. Saves q, k, v, the
/// result and one value a row for backward. Scores in memory: N · queries · keys, three times in
/// forward and four times in backward, and once more with dropout. UsageError in a backward with
/// create_graph.
at::Tensor blockwise_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               double dropout, const AttentionBlocks& blocks = {});

}  // namespace tessera
