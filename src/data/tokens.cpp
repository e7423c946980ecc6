#include <torch/torch.h>

#include <algorithm>

#include "tessera/data.h"
#include "tessera/error.h"

namespace tessera {

Tokens::Tokens(std::shared_ptr<const void> storage, const void* data, int64_t size, int width, std::string source)
    : storage_(std::move(storage)), size_(size), width_(width), source_(std::move(source)) {
  if ((width != 1 && width != 2) || size < 0) {
    throw UsageError("Tokens: " + source_ + ": width " + std::to_string(width) + " (1 or 2 bytes), size " +
                     std::to_string(size));
  }
  if (width == 1) {
    bytes_ = static_cast<const uint8_t*>(data);
  } else {
    words_ = static_cast<const uint16_t*>(data);
  }
}

Tokens Tokens::from(const std::vector<uint16_t>& tokens, std::string source) {
  const auto storage = std::make_shared<const std::vector<uint16_t>>(tokens);
  return Tokens(storage, storage->data(), static_cast<int64_t>(storage->size()), 2, std::move(source));
}

Tokens Tokens::slice(int64_t begin, int64_t count, std::string source) const {
  if (begin < 0 || count < 0 || begin > size_ || count > size_ - begin) {
    throw UsageError("Tokens: " + source_ + ": tokens [" + std::to_string(begin) + ", +" + std::to_string(count) +
                     ") are not within its " + std::to_string(size_));
  }
  const void* data = width_ == 1 ? static_cast<const void*>(bytes_ + begin) : words_ + begin;
  return Tokens(storage_, data, count, width_, std::move(source));
}

at::Tensor Tokens::tensor() const {
  at::Tensor out = at::empty({size_}, at::kLong);
  int64_t* to = out.data_ptr<int64_t>();
  if (width_ == 1) {
    std::copy(bytes_, bytes_ + size_, to);
  } else {
    std::copy(words_, words_ + size_, to);
  }
  return out;
}

void Tokens::require_below(int64_t vocab_size) const {
  const auto check = [&](const auto* tokens) {
    const auto* found = std::find_if(tokens, tokens + size_, [&](auto token) { return token >= vocab_size; });
    if (found != tokens + size_) {
      throw UsageError(source_ + ": token " + std::to_string(*found) + " at position " +
                       std::to_string(found - tokens) + " is not below vocab_size, " + std::to_string(vocab_size));
    }
  };
  if (size_ == 0 || vocab_size > (width_ == 1 ? 0xff : 0xffff)) {
    return;
  }
  if (width_ == 1) {
    check(bytes_);
  } else {
    check(words_);
  }
}

}  // namespace tessera
