#include "tessera/tokens.h"

#include <torch/torch.h>

#include <algorithm>

#include "tessera/error.h"

namespace tessera {

Tokens::Tokens(std::vector<Piece> pieces, std::string source) : source_(std::move(source)) {
  for (Piece& piece : pieces) {
    piece.begin = size_;
    size_ += piece.size;
  }
  if (size_ > 0) {
    pieces_ = std::make_shared<const std::vector<Piece>>(std::move(pieces));
  }
}

Tokens::Tokens(std::shared_ptr<const void> storage, const void* data, int64_t size, int width, std::string source) {
  if ((width != 1 && width != 2) || size < 0) {
    throw UsageError("Tokens: " + source + ": width " + std::to_string(width) + " (1 or 2 bytes), size " +
                     std::to_string(size));
  }
  *this = Tokens({Piece{std::move(storage), data, width, 0, size, source}}, source);
}

Tokens Tokens::from(const std::vector<uint16_t>& tokens, std::string source) {
  const auto storage = std::make_shared<const std::vector<uint16_t>>(tokens);
  return Tokens(storage, storage->data(), static_cast<int64_t>(storage->size()), 2, std::move(source));
}

Tokens Tokens::joined(const std::vector<Tokens>& parts, std::string source) {
  std::vector<Piece> pieces;
  for (const Tokens& part : parts) {
    if (part.pieces_) {
      pieces.insert(pieces.end(), part.pieces_->begin(), part.pieces_->end());
    }
  }
  return Tokens(std::move(pieces), std::move(source));
}

size_t Tokens::piece_of(int64_t i) const {
  const auto after = std::upper_bound(pieces_->begin(), pieces_->end(), i,
                                      [](int64_t position, const Piece& piece) { return position < piece.begin; });
  return static_cast<size_t>(after - pieces_->begin()) - 1;
}

int64_t Tokens::operator[](int64_t i) const {
  const Piece& piece = pieces_->size() == 1 ? pieces_->front() : (*pieces_)[piece_of(i)];
  return piece.at(i - piece.begin);
}

void Tokens::read(int64_t begin, int64_t count, int64_t* out) const {
  for (size_t p = count > 0 ? piece_of(begin) : 0; count > 0; ++p) {
    const Piece& piece = (*pieces_)[p];
    const int64_t first = begin - piece.begin, run = std::min(count, piece.size - first);
    if (piece.width == 1) {
      std::copy_n(static_cast<const uint8_t*>(piece.data) + first, run, out);
    } else {
      std::copy_n(static_cast<const uint16_t*>(piece.data) + first, run, out);
    }
    begin += run;
    out += run;
    count -= run;
  }
}

Tokens Tokens::slice(int64_t begin, int64_t count, std::string source) const {
  if (begin < 0 || count < 0 || begin > size_ || count > size_ - begin) {
    throw UsageError("Tokens: " + source_ + ": tokens [" + std::to_string(begin) + ", +" + std::to_string(count) +
                     ") are not within its " + std::to_string(size_));
  }
  std::vector<Piece> pieces;
  for (size_t p = count > 0 ? piece_of(begin) : 0; count > 0; ++p) {
    Piece piece = (*pieces_)[p];
    const int64_t first = begin - piece.begin;
    piece.data = static_cast<const uint8_t*>(piece.data) + first * piece.width;
    piece.size = std::min(count, piece.size - first);
    begin += piece.size;
    count -= piece.size;
    pieces.push_back(std::move(piece));
  }
  return Tokens(std::move(pieces), std::move(source));
}

at::Tensor Tokens::tensor() const {
  at::Tensor out = at::empty({size_}, at::kLong);
  read(0, size_, out.data_ptr<int64_t>());
  return out;
}

void Tokens::require_below(int64_t vocab_size) const {
  if (size_ == 0) {
    return;
  }
  for (const Piece& piece : *pieces_) {
    if (vocab_size > (piece.width == 1 ? 0xff : 0xffff)) {
      continue;
    }
    for (int64_t i = 0; i < piece.size; ++i) {
      if (piece.at(i) >= vocab_size) {
        throw UsageError(source_ + ": token " + std::to_string(piece.at(i)) + " at position " +
                         std::to_string(piece.begin + i) + " is not below vocab_size, " + std::to_string(vocab_size) +
                         (pieces_->size() > 1 ? " (in " + piece.source + ")" : ""));
      }
    }
  }
}

}  // namespace tessera
