#include "tessera/data/tokens.h"

#include <algorithm>

#include <torch/types.h>

#include "data/mapped_file.h"
#include "tessera/error.h"

namespace tessera {

Tokens::Tokens(std::vector<Chunk> chunks, std::string source) : source_(std::move(source)) {
  for (Chunk& chunk : chunks) {
    chunk.begin = size_;
    size_ += chunk.size;
  }
  if (size_ > 0) chunks_ = std::make_shared<const std::vector<Chunk>>(std::move(chunks));
}

Tokens::Tokens(std::shared_ptr<const void> storage, const void* data, int64_t size, int width,
               std::string source) {
  if ((width != 1 && width != 2) || size < 0) {
    throw UsageError("Tokens: " + source + ": width " + std::to_string(width) +
                     " (1 or 2 bytes), size " + std::to_string(size));
  }
  *this = Tokens({Chunk{std::move(storage), data, width, 0, size, source}}, source);
}

Tokens Tokens::from(const std::vector<uint16_t>& tokens, std::string source) {
  const auto storage = std::make_shared<const std::vector<uint16_t>>(tokens);
  return Tokens(storage, storage->data(), static_cast<int64_t>(storage->size()), 2,
                std::move(source));
}

Tokens Tokens::joined(const std::vector<Tokens>& parts, std::string source) {
  std::vector<Chunk> chunks;
  for (const Tokens& part : parts)
    if (part.chunks_) chunks.insert(chunks.end(), part.chunks_->begin(), part.chunks_->end());
  return Tokens(std::move(chunks), std::move(source));
}

size_t Tokens::chunk_of(int64_t i) const {
  const auto after =
      std::upper_bound(chunks_->begin(), chunks_->end(), i,
                       [](int64_t position, const Chunk& chunk) { return position < chunk.begin; });
  return static_cast<size_t>(after - chunks_->begin()) - 1;
}

int64_t Tokens::operator[](int64_t i) const {
  const Chunk& chunk = chunks_->size() == 1 ? chunks_->front() : (*chunks_)[chunk_of(i)];
  const int64_t token = chunk.at(i - chunk.begin);
  check_mapped_pages(chunk.data);
  return token;
}

void Tokens::read(int64_t begin, int64_t count, int64_t* out) const {
  for (size_t p = count > 0 ? chunk_of(begin) : 0; count > 0; ++p) {
    const Chunk& chunk = (*chunks_)[p];
    const int64_t first = begin - chunk.begin, run = std::min(count, chunk.size - first);
    if (chunk.width == 1) std::copy_n(static_cast<const uint8_t*>(chunk.data) + first, run, out);
    else std::copy_n(static_cast<const uint16_t*>(chunk.data) + first, run, out);
    check_mapped(chunk.data);
    begin += run;
    out += run;
    count -= run;
  }
}

Tokens Tokens::slice(int64_t begin, int64_t count, std::string source) const {
  if (begin < 0 || count < 0 || begin > size_ || count > size_ - begin) {
    throw UsageError("Tokens: " + source_ + ": tokens [" + std::to_string(begin) + ", +" +
                     std::to_string(count) + ") are not within its " + std::to_string(size_));
  }
  std::vector<Chunk> chunks;
  for (size_t p = count > 0 ? chunk_of(begin) : 0; count > 0; ++p) {
    Chunk chunk = (*chunks_)[p];
    const int64_t first = begin - chunk.begin;
    chunk.data = static_cast<const uint8_t*>(chunk.data) + first * chunk.width;
    chunk.size = std::min(count, chunk.size - first);
    begin += chunk.size;
    count -= chunk.size;
    chunks.push_back(std::move(chunk));
  }
  return Tokens(std::move(chunks), std::move(source));
}

at::Tensor Tokens::tensor() const {
  at::Tensor out = at::empty({size_}, at::kLong);
  read(0, size_, out.data_ptr<int64_t>());
  return out;
}

void Tokens::require_below(int64_t vocab_size) const {
  if (size_ == 0) return;
  for (const Chunk& chunk : *chunks_) {
    if (vocab_size > (chunk.width == 1 ? 0xff : 0xffff)) continue;
    for (int64_t i = 0; i < chunk.size; ++i) {
      if (chunk.at(i) >= vocab_size) {
        throw UsageError(source_ + ": token " + std::to_string(chunk.at(i)) + " at position " +
                         std::to_string(chunk.begin + i) + " is not below vocab_size, " +
                         std::to_string(vocab_size) +
                         (chunks_->size() > 1 ? " (in " + chunk.source + ")" : ""));
      }
    }
    check_mapped(chunk.data);
  }
}

}  // namespace tessera
