#pragma once

#include <string>
#include <vector>

#include "sharding/named_tensor.h"

namespace tessera::sharding {

/// Memory of a parameter that something else uses, which would keep the present values if the
/// parameter moved to other memory.
struct SharedMemory {
  size_t parameter;  ///< Index into the given parameters.
  std::string
      holder;  ///< "buffer w", "parameter b.weight", or what is known of one without a name.
};

/// Which of `parameters` share memory with a parameter or buffer of `module` (may be null) that is
/// another tensor, with a tensor that `module` has not registered, or with the program (from_blob).
/// One tensor with several names shares nothing, and neither do windows of one buffer. Reads no
/// memory. Local.
std::vector<SharedMemory> shared_memory_of(const std::vector<NamedTensor>& parameters,
                                           const torch::nn::Module* module);

}  // namespace tessera::sharding
