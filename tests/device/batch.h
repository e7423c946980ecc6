#pragma once

#include <vector>

#include <torch/types.h>

namespace tessera::on_device {

/// Inputs of testing::Uneven: the same on every device.
inline at::Tensor batch(int step, int rank, at::Device where) {
  return at::randn({4, 3}, at::make_generator<at::CPUGeneratorImpl>(100 + 10 * step + rank))
      .to(where);
}

/// Of steps from 0 on. The host has waited for the copies.
inline std::vector<at::Tensor> batches_of(int count, int rank, at::Device where) {
  std::vector<at::Tensor> result;
  for (int step = 0; step < count; ++step) result.push_back(batch(step, rank, where));
  return result;
}

}  // namespace tessera::on_device
