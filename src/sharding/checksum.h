#pragma once

#include <cstdint>

#include <ATen/ATen.h>

namespace tessera::sharding {

/// XXH3 of the values of a tensor in row-major order. Copies from a device; local.
uint64_t checksum(const at::Tensor& tensor);

}  // namespace tessera::sharding
