#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/data/tokens.h"

// Files of tokens for language models. Every rank opens the same files. Local.

#pragma GCC visibility push(default)
namespace tessera {

/// The two parts of a data set. `val` is empty (size 0) if there is no evaluation part.
struct TokenData {
  Tokens train;
  Tokens val;
};

/// Text files as bytes: tokens 0 to 255.
struct ByteText {
  /// Files, folders or glob patterns, read in this order. A folder or a pattern stands for its
  /// regular files, sorted by name; sub-folders are not entered. Symbolic links inside a folder and
  /// among a pattern's matches are skipped, so that no file is counted twice.
  std::vector<std::string> paths{"/usr/share/common-licenses"};
  /// In [0, 1). The first ⌊N·(1 − val_fraction)⌋ of N tokens are `train`, the others `val`.
  double val_fraction = 0.1;

  /// Throws UsageError naming the path if it is missing or unreadable, and if there are no bytes.
  TokenData load() const;
};

/// Token files of llm.c: a header of 256 int32 (magic 20240520, version 1, number of tokens), then
/// uint16 tokens. The files are memory-mapped. If one is shortened while its tokens are in use,
/// reading them throws Error with its name. Several files form one stream, in this order, so
/// sequences run across the ends of files.
struct TokenBin {
  std::vector<std::string> paths;      ///< As ByteText's. All of it is `train`.
  std::vector<std::string> val_paths;  ///< All of it is `val`. Empty: no `val`.
  int64_t vocab_size = 0;              ///< The model's; 0: tokens are not checked.

  /// Throws UsageError naming the file if it is missing, has a wrong magic number, version or size,
  /// has no tokens, or has a token ≥ vocab_size (the message gives its position).
  TokenData load() const;
};

}  // namespace tessera
#pragma GCC visibility pop
