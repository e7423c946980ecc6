#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/data/dataset.h"
#include "tessera/data/tokens.h"

// Token streams for language models, and batches cut from them. Every rank opens the same files and
// takes its own part of each batch by arithmetic: no collectives, nothing random that ranks could
// disagree on.

namespace tessera {

/// The two parts of a data set. `val` is empty (size 0) when there is none.
struct TokenData {
  Tokens train;
  Tokens val;
};

/// Text as bytes: tokens 0…255.
struct ByteText {
  /// Each a file, a folder or a glob pattern, read in this order. Of a folder (not of its
  /// sub-folders) and of a pattern, the regular files are taken, sorted by name; symbolic links are
  /// skipped there, so that nothing is counted twice.
  std::vector<std::string> paths{"/usr/share/common-licenses"};
  /// In [0, 1). The first ⌊N·(1 − val_fraction)⌋ of N tokens are `train`, the others `val`.
  double val_fraction = 0.1;

  /// Throws UsageError naming the path when it is missing or unreadable, and when there are no
  /// bytes at all.
  TokenData load() const;
};

/// Token files of llm.c: 256 int32 (magic 20240520, version 1, number of tokens), then uint16
/// tokens. Mapped, not read: do not shorten a file in use. Several files are one stream, in this
/// order, as if they were one file: sequences run on across their ends.
struct TokenBin {
  std::vector<std::string> paths;      ///< as ByteText's; all of it is `train`
  std::vector<std::string> val_paths;  ///< all of it is `val`; none: no `val`
  int64_t vocab_size = 0;              ///< of the model; 0: do not check

  /// Throws UsageError naming the file: missing, wrong magic, version or size, no tokens, a token ≥
  /// vocab_size with its position.
  TokenData load() const;
};

/// Sequences of T = seq_len tokens, of L tokens altogether. inputs and targets int64 [B, T]; a
/// target is its input's next token.
///
/// continuous: position k of sample i is p = (i·T + k) mod (L − 1); its input is token p, its
/// target token p + 1. So the samples follow one another through the text without a gap, wrap
/// around, and every target is its input's true successor. Beyond size() they do not begin anew,
/// they go on.
///
/// Otherwise sample n is window n mod N of the N = ⌊(L − 1)/T⌋ windows of inputs [n·T, n·T + T). In
/// both cases size() is N.
class TokenDataset : public Dataset {
 public:
  /// Throws UsageError when L < seq_len + 1, naming source and sizes, or seq_len < 1.
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

/// Cross entropy in nats per token of `val` under a bigram model of `train`: p(b|a) = (n(a,b) + k)
/// / (n(a) + k·vocab_size), at the best of k = 1, 0.1, 0.01, 0.001 for `val`: the strongest figure
/// such a model can claim. Throws UsageError when either part has less than two tokens or a token ≥
/// vocab_size.
double bigram_cross_entropy(const Tokens& train, const Tokens& val, int64_t vocab_size);

}  // namespace tessera
