#pragma once

#include "tessera/process_group.h"
#include "tessera/train/config.h"

namespace tessera::train {

/// The options of a run's group. Tensors of the model's device travel through the host's memory if
/// parallel.backend is none that moves them. Local.
ProcessGroupOptions group_options(const Config& config);

}  // namespace tessera::train
