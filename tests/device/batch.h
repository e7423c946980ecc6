#pragma once

#include <torch/torch.h>

namespace tessera::on_device {

/// Inputs of testing::Uneven: the same on every device.
inline at::Tensor batch(int step, int rank, at::Device where) {
  return at::randn({4, 3}, at::make_generator<at::CPUGeneratorImpl>(100 + 10 * step + rank))
      .to(where);
}

}  // namespace tessera::on_device
