#pragma once

#include <string>
#include <vector>

#include "sharding/named_tensor.h"

namespace tessera::sharding {

/// Memory of a parameter that something else uses too. The other user would keep the present values
/// if the parameter moved to other memory.
struct SharedMemory {
  size_t parameter;  ///< Index into the given parameters.
  std::string
      holder;  ///< "buffer w", "parameter b.weight", or what is known of one without a name.
};

/// Finds the `parameters` that share memory with another parameter or buffer of `module` (may be
/// null), with a tensor that `module` has not registered, or with the program (from_blob). One
/// tensor with several names does not count as sharing, nor do separate windows of one buffer.
/// Reads no memory. Local.
std::vector<SharedMemory> shared_memory_of(const std::vector<NamedTensor>& parameters,
                                           const torch::nn::Module* module);

}  // namespace tessera::sharding
