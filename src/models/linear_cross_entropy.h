#pragma once

#include <torch/types.h>

namespace tessera {

/// Numbers of tokens and classes whose logits chunked_cross_entropy() has in memory at a time. At
/// least 1.
struct CrossEntropyChunks {
  int64_t tokens, classes;

  /// At most 2^23 logits (32 MiB in float32) of at most 65536 classes.
  static CrossEntropyChunks of(int64_t classes);
};

/// at::cross_entropy_loss(rows·weightᵀ, targets): the mean in nats over the targets that are not
/// -100, NaN if there are none. `rows` is [N, width], `weight` is [classes, width], `targets` is
/// int64 [N]. UsageError for a target out of range; on an accelerator the loss is NaN instead,
/// because the host would wait for the device at each call.
///
/// At most one chunk of logits exists at a time: for more, chunked_cross_entropy() computes the
/// loss.
at::Tensor linear_cross_entropy(const at::Tensor& rows, const at::Tensor& weight,
                                const at::Tensor& targets);

/// The same for checked targets, one chunk of logits after the other. Sums over classes and tokens,
/// and the result, are float32, or float64 for such rows. Needed gradients are computed with the
/// loss, so that each logit is computed once. It is computed twice if there are more classes than
/// one chunk has, and for float16, whose gradients need the loss's scale.
///
/// Memory beside rows and weight: the gradients of both, and one chunk of logits, two if there are
/// more classes than a chunk has (one more for other dtypes than float32 and float64). UsageError
/// in a backward with create_graph.
at::Tensor chunked_cross_entropy(const at::Tensor& rows, const at::Tensor& weight,
                                 const at::Tensor& targets, const CrossEntropyChunks& chunks);

}  // namespace tessera
