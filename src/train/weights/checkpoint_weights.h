#pragma once

#include <memory>

#include "tessera/checkpoint_store.h"
#include "tessera/weights/tensor_source.h"

namespace tessera::train {

/// The file with the weights of a checkpoint that has one file of them.
inline constexpr const char* kCheckpointWeights = "weights.safetensors";

/// The weights of a checkpoint, opened for reading. This function and every member of the result
/// may read files of other hosts, so they are called within Checkpoint::read_together(). `load`
/// compares digests; `load_slice` does where the slice is the whole tensor. `checkpoint` must
/// outlive the result.
std::unique_ptr<TensorSource> open_weights(const Checkpoint& checkpoint);

}  // namespace tessera::train
