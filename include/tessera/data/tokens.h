#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/types.h>

#pragma GCC visibility push(default)
namespace tessera {

/// An immutable sequence of tokens, 8 or 16 bits each, in memory or memory-mapped from files. Cheap
/// to copy: copies share the storage and keep it alive.
class Tokens {
 public:
  Tokens() = default;
  /// `data` points to `size` little-endian tokens of `width` bytes (1 or 2), inside `storage`.
  /// `source` names them in error messages. Throws UsageError for another width or a negative size.
  Tokens(std::shared_ptr<const void> storage, const void* data, int64_t size, int width,
         std::string source);
  /// Copies tokens from memory, for tests and for programs with their own tokenizer.
  static Tokens from(const std::vector<uint16_t>& tokens, std::string source = "tokens");
  /// The concatenation of `parts`, without a copy. read() costs the same as on a single part;
  /// operator[] searches for the part that holds the token.
  static Tokens joined(const std::vector<Tokens>& parts, std::string source);

  int64_t size() const { return size_; }
  int64_t operator[](int64_t i) const;
  const std::string& source() const { return source_; }
  /// Copies tokens [begin, begin + count) to `out`. The range must lie within the tokens.
  void read(int64_t begin, int64_t count, int64_t* out) const;
  /// Tokens [begin, begin + count), without a copy. Throws UsageError if the range exceeds the
  /// tokens.
  Tokens slice(int64_t begin, int64_t count, std::string source) const;
  /// A copy, int64 [size].
  at::Tensor tensor() const;
  /// Throws UsageError if a token is ≥ vocab_size. The message gives the first such token, its
  /// position and, for joined tokens, its part.
  void require_below(int64_t vocab_size) const;

 private:
  struct Chunk {
    std::shared_ptr<const void> storage;
    const void* data = nullptr;
    int width = 1;
    int64_t begin = 0, size = 0;  // position in the whole sequence, and length
    std::string source;

    int64_t at(int64_t i) const {
      return width == 1 ? static_cast<const uint8_t*>(data)[i]
                        : static_cast<const uint16_t*>(data)[i];
    }
  };

  Tokens(std::vector<Chunk> chunks, std::string source);
  size_t chunk_of(int64_t i) const;

  std::shared_ptr<const std::vector<Chunk>> chunks_;  // no empty chunks; null: no tokens
  int64_t size_ = 0;
  std::string source_;
};

}  // namespace tessera
#pragma GCC visibility pop
