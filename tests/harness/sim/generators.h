#pragma once

#include <ATen/core/Generator.h>

namespace tessera::sim {

/// The default generator of a device: one of its own for each, which the random kernels use.
const at::Generator& generator(int device);

}  // namespace tessera::sim
