#include "local_sgd/block_int8.h"

namespace tessera::local_sgd {
namespace {

int64_t blocks_of(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

constexpr double kLargest = 127;

}  // namespace

int64_t quantized_bytes(int64_t numel) {
  return blocks_of(numel) * (kBlock + static_cast<int64_t>(sizeof(float)));
}

at::Tensor quantize(const at::Tensor& values) {
  const int64_t numel = values.numel(), blocks = blocks_of(numel);
  const at::Tensor padded = at::zeros({blocks * kBlock}, values.options());
  padded.narrow(0, 0, numel).copy_(values);
  const at::Tensor rows = padded.view({blocks, kBlock});
  const at::Tensor scales =
      blocks > 0 ? rows.abs().amax(1, true).div(kLargest) : at::zeros({0, 1}, values.options());
  const at::Tensor divisors = at::where(scales.eq(0), at::ones_like(scales), scales);
  const at::Tensor codes =
      rows.div(divisors).nan_to_num(0, 0, 0).round().clamp(-kLargest, kLargest).to(at::kChar);
  return at::cat({codes.reshape({-1}).view(at::kByte), scales.reshape({-1}).view(at::kByte)});
}

at::Tensor dequantize(const at::Tensor& bytes, int64_t numel) {
  const int64_t blocks = blocks_of(numel);
  const at::Tensor codes = bytes.narrow(0, 0, blocks * kBlock).view(at::kChar).to(at::kFloat);
  // A copy, because the scales of a part of a buffer may lie at any address.
  const at::Tensor scales =
      bytes.narrow(0, blocks * kBlock, blocks * static_cast<int64_t>(sizeof(float)))
          .clone()
          .view(at::kFloat);
  return codes.view({blocks, kBlock}).mul(scales.view({blocks, 1})).view({-1}).narrow(0, 0, numel);
}

}  // namespace tessera::local_sgd
