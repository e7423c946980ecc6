#pragma once

#include <cstddef>

#include <ATen/ATen.h>

namespace tessera::comm {

inline std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

}  // namespace tessera::comm
