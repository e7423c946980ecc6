#pragma once

#include <cstdint>

#include <torch/torch.h>

namespace tessera::local_sgd {

constexpr int64_t kBlock = 256;  ///< values that share a scale

/// Bytes of `numel` quantised values with their scales.
int64_t quantized_bytes(int64_t numel);

/// `values` (1-D, float32) as bytes: one int8 for each value, zeros up to a whole block, then a
/// float32 scale for each block, its largest magnitude / 127. A block with a value that is not
/// finite becomes NaN as a whole.
at::Tensor quantize(const at::Tensor& values);
/// The values of `bytes` (1-D, uint8, quantized_bytes(numel) elements) as float32.
at::Tensor dequantize(const at::Tensor& bytes, int64_t numel);

}  // namespace tessera::local_sgd
