#pragma once

#include <cstdint>

#include "tessera/data/tokens.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Cross entropy in nats per token of `val` under a bigram model of `train`: p(b|a) = (n(a,b) + k)
/// / (n(a) + k·vocab_size), where k is the one of 1, 0.1, 0.01 and 0.001 that is best for `val`.
/// This is the strongest figure that such a model can claim. Throws UsageError if either part has
/// fewer than two tokens or has a token ≥ vocab_size.
double bigram_cross_entropy(const Tokens& train, const Tokens& val, int64_t vocab_size);

}  // namespace tessera
#pragma GCC visibility pop
