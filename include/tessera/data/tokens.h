#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/types.h>

namespace tessera {

/// An immutable run of tokens, 8 or 16 bits each, in memory or mapped from files. Cheap to copy;
/// keeps its storage alive.
class Tokens {
 public:
  Tokens() = default;
  /// `data` points to `size` tokens of `width` (1 or 2) bytes, little-endian, inside `storage`.
  /// `source` names them in errors.
  Tokens(std::shared_ptr<const void> storage, const void* data, int64_t size, int width,
         std::string source);
  /// From memory, for tests and programs with their own tokenizer.
  static Tokens from(const std::vector<uint16_t>& tokens, std::string source = "tokens");
  /// `parts` one after another, not copied. Reading a run costs what it costs in one part;
  /// operator[] searches for the part.
  static Tokens joined(const std::vector<Tokens>& parts, std::string source);

  int64_t size() const { return size_; }
  int64_t operator[](int64_t i) const;
  const std::string& source() const { return source_; }
  /// Tokens [begin, begin + count) to `out`; they must be there.
  void read(int64_t begin, int64_t count, int64_t* out) const;
  /// Tokens [begin, begin + count); throws UsageError when they are not all there.
  Tokens slice(int64_t begin, int64_t count, std::string source) const;
  /// A copy, int64 [size].
  at::Tensor tensor() const;
  /// Throws UsageError naming the first token ≥ vocab_size, its position, and of joined tokens its
  /// part.
  void require_below(int64_t vocab_size) const;

 private:
  struct Chunk {
    std::shared_ptr<const void> storage;
    const void* data = nullptr;
    int width = 1;
    int64_t begin = 0, size = 0;  // within the whole
    std::string source;

    int64_t at(int64_t i) const {
      return width == 1 ? static_cast<const uint8_t*>(data)[i]
                        : static_cast<const uint16_t*>(data)[i];
    }
  };

  Tokens(std::vector<Chunk> chunks, std::string source);
  size_t chunk_of(int64_t i) const;

  std::shared_ptr<const std::vector<Chunk>> chunks_;  // none of them empty; null: no tokens
  int64_t size_ = 0;
  std::string source_;
};

}  // namespace tessera
