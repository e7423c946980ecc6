#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// Token streams for language models, and batches cut from them. Every rank opens the same files and takes its own
// part of each batch by arithmetic: no collectives, nothing random that ranks could disagree on.

namespace tessera {

/// An immutable run of tokens, 8 or 16 bits each, in memory or mapped from a file. Cheap to copy; keeps its storage
/// alive.
class Tokens {
 public:
  Tokens() = default;
  /// `data` points to `size` tokens of `width` (1 or 2) bytes, little-endian, inside `storage`. `source` names them in
  /// errors.
  Tokens(std::shared_ptr<const void> storage, const void* data, int64_t size, int width, std::string source);
  /// From memory, for tests and programs with their own tokenizer.
  static Tokens from(const std::vector<uint16_t>& tokens, std::string source = "tokens");

  int64_t size() const { return size_; }
  int64_t operator[](int64_t i) const { return width_ == 1 ? bytes_[i] : words_[i]; }
  const std::string& source() const { return source_; }
  /// Tokens [begin, begin + count); throws UsageError when they are not all there.
  Tokens slice(int64_t begin, int64_t count, std::string source) const;
  /// A copy, int64 [size].
  at::Tensor tensor() const;
  /// Throws UsageError naming the first token ≥ vocab_size and its position.
  void require_below(int64_t vocab_size) const;

 private:
  std::shared_ptr<const void> storage_;
  const uint8_t* bytes_ = nullptr;   // width 1
  const uint16_t* words_ = nullptr;  // width 2
  int64_t size_ = 0;
  int width_ = 1;
  std::string source_;
};

/// The two parts of a data set. `val` is empty (size 0) when there is none.
struct TokenData {
  Tokens train;
  Tokens val;
};

/// Text as bytes: tokens 0…255.
struct ByteText {
  /// Each a file, a folder or a glob pattern, read in this order. Of a folder (not of its sub-folders) and of a
  /// pattern, the regular files are taken, sorted by name; symbolic links are skipped there, so that nothing is counted
  /// twice.
  std::vector<std::string> paths{"/usr/share/common-licenses"};
  /// In [0, 1). The first ⌊N·(1 − val_fraction)⌋ of N tokens are `train`, the others `val`.
  double val_fraction = 0.1;

  /// Throws UsageError naming the path when it is missing or unreadable, and when there are no bytes at all.
  TokenData load() const;
};

/// Token files of llm.c: 256 int32 (magic 20240520, version 1, number of tokens), then uint16 tokens. Mapped, not read:
/// do not shorten a file in use.
struct TokenBin {
  std::string path;        ///< all of it is `train`
  std::string val_path;    ///< all of it is `val`; empty: none
  int64_t vocab_size = 0;  ///< of the model; 0: do not check

  /// Throws UsageError naming the file: missing, wrong magic, version or size, a token ≥ vocab_size with its position.
  TokenData load() const;
};

/// int64 [B, T] each; targets are the inputs' next tokens.
struct Batch {
  at::Tensor inputs;
  at::Tensor targets;
};

struct BatchOptions {
  enum class Order { sequential, shuffled };

  int64_t seq_len = 128;
  int64_t global_batch = 16;  ///< sequences a step, over all ranks
  Order order = Order::shuffled;
  uint64_t seed = 0;  ///< of `shuffled`
};

/// Which tokens make up which batch. With L tokens, T = seq_len and G = global_batch, sequence j of step s is number
/// i = s·G + j, on whichever rank: rank r of W takes j in [r·G/W, (r+1)·G/W), in this order.
///
/// sequential: position k of sequence i is p = (i·T + k) mod (L − 1); its input is token p, its target token p + 1. So
/// the sequences follow one another through the text without a gap, wrap around, and every target is its input's true
/// successor.
///
/// shuffled: the N = ⌊(L − 1)/T⌋ windows of inputs [n·T, n·T + T), each once an epoch, in an order drawn from seed and
/// epoch (i / N): independent of world size and of the batch's size.
class TokenBatches {
 public:
  /// Throws UsageError when L < seq_len + 1, naming source and sizes, or an option is out of range.
  TokenBatches(Tokens tokens, const BatchOptions& options);

  /// Throws UsageError when world does not divide global_batch.
  Batch batch(int64_t step, int rank, int world) const;

  const BatchOptions& options() const { return options_; }
  /// Non-overlapping windows: N above.
  int64_t windows() const;

 private:
  int64_t start(int64_t sequence) const;

  Tokens tokens_;
  BatchOptions options_;
};

/// Evaluation: the non-overlapping windows of `tokens` in their order. The same for every caller.
int64_t window_count(const Tokens& tokens, int64_t seq_len);
/// Windows [first, first + count); count is cut at the last one. Throws UsageError when there is none from `first` on.
Batch window_batch(const Tokens& tokens, int64_t seq_len, int64_t first, int64_t count);

/// Cross entropy in nats per token of `val` under a bigram model of `train`: p(b|a) = (n(a,b) + k) / (n(a) +
/// k·vocab_size), at the best of k = 1, 0.1, 0.01, 0.001 for `val`: the strongest figure such a model can claim. Throws
/// UsageError when either part has less than two tokens or a token ≥ vocab_size.
double bigram_cross_entropy(const Tokens& train, const Tokens& val, int64_t vocab_size);

}  // namespace tessera
