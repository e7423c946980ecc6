#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/data/dataset.h"
#include "tessera/data/tokens.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Sequences of T = seq_len tokens, cut from a stream of L tokens. Inputs and targets are int64
/// [B, T]; each target is the token that follows its input.
///
/// continuous: position k of sample i is p = (i·T + k) mod (L − 1); its input is token p, its
/// target token p + 1. The samples follow one another through the stream without a gap and wrap
/// around, and every target is its input's true successor. Samples beyond size() continue the
/// stream instead of starting from the beginning.
///
/// Otherwise sample n is window n mod N of the N = ⌊(L − 1)/T⌋ windows of inputs [n·T, n·T + T).
///
/// In both cases size() is N. Every rank reads its own samples. Nothing is random and nothing
/// communicates.
class TokenDataset : public Dataset {
 public:
  /// Throws UsageError naming source and sizes if L < seq_len + 1, and if seq_len < 1.
  TokenDataset(Tokens tokens, int64_t seq_len, bool continuous);

  int64_t size() const override { return (tokens_.size() - 1) / seq_len_; }
  Batch get(const std::vector<int64_t>& samples) const override;
  int64_t tokens_per_sample() const override { return seq_len_; }
  std::string describe() const override;

 private:
  int64_t start(int64_t sample) const;

  Tokens tokens_;
  int64_t seq_len_;
  bool continuous_;
};

}  // namespace tessera
#pragma GCC visibility pop
