#pragma once

#include <cstdint>
#include <cstring>

#include <torch/types.h>

namespace tessera::testing {

/// A hash of shape and bits.
inline uint64_t bits(const at::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  const auto memory = tensor.detach().contiguous();
  uint64_t hash = 1469598103934665603ull;
  const auto add = [&](uint64_t value) { hash = (hash ^ value) * 1099511628211ull; };
  for (const auto size : tensor.sizes()) add(static_cast<uint64_t>(size));
  const auto* bytes = static_cast<const unsigned char*>(memory.data_ptr());
  for (size_t i = 0; i < memory.nbytes(); ++i) add(bytes[i]);
  return hash;
}

}  // namespace tessera::testing
